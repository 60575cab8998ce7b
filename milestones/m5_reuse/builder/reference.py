"""A prefix cache as a radix tree: a node is a full block, its path from the root is what the block holds."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from folovllm.cache.cached_prefix import PrefixCacheStats
from folovllm.cache.manager import KVCacheManager
from folovllm.cache.prefix_cache import cached_prefix_of
from folovllm.engine.event_stream import Events
from folovllm.request import Sequence, SequenceStatus


@dataclass(slots=True, eq=False)
class Node:
    """A block that can be found. Whoever holds it holds its parents too, so that no path is ever cut."""

    block_id: int
    tokens: bytes
    parent: Node | None
    is_lost: bool = False  # a reset happened: nobody finds it any more
    num_holders: int = 0
    last_use: int = 0
    children: dict[bytes, Node] = field(default_factory=dict)


class PrefixCache(KVCacheManager):
    """Blocks are blank, private to a sequence, or nodes. What is given up first is the leaf that was unused for longest."""

    def __init__(self, num_blocks: int, block_size: int, events: Events | None = None) -> None:
        super().__init__(num_blocks, block_size, events)
        self._blank = list(reversed(range(num_blocks)))
        self._roots: dict[str | None, Node] = {}  # by salt
        self._paths: dict[int, list[Node]] = {}  # by seq_id: nodes of its first blocks, which it holds
        self._leaves: list[tuple[int, int, Node]] = []  # a heap of those that were unused leaves at some time
        self._num_unused = 0  # nodes that nobody holds
        self._clock = itertools.count(1)
        self._stats = PrefixCacheStats()

    def get_computed_blocks(self, seq: Sequence) -> None:
        """Walk down the tree along the tokens of `seq`; one token is left to compute."""
        if seq.num_unscored_tokens:
            return
        path = self._paths[seq.seq_id] = []
        node: Node | None = self._root(seq)
        for i in range((seq.num_tokens - 1) // self.block_size):
            assert node is not None
            if (node := node.children.get(self._tokens(seq, i))) is None:
                break
            self._hold(node)
            path.append(node)
            seq.block_table.append(node.block_id)
        seq.num_computed_tokens = len(path) * self.block_size

    def allocate_slots(self, seq: Sequence, num_new_tokens: int) -> bool:
        """Private blocks for the next tokens."""
        needed = -(-(seq.num_computed_tokens + num_new_tokens) // self.block_size)
        missing = max(0, needed - len(seq.block_table))
        if missing > self.num_free:
            return False
        seq.block_table.extend(self._take() for _ in range(missing))
        if seq.status is SequenceStatus.WAITING:
            self._count(seq)
        return True

    def cache_scheduled_blocks(self, seqs: Iterable[Sequence]) -> None:
        """The coming step writes their K/V before anybody reads it, so it can be found at once."""
        for seq in seqs:
            self.cache_blocks(seq)

    def cache_blocks(self, seq: Sequence) -> None:
        """Full private blocks become nodes. Where there is such a node, the path goes through it and the block stays private."""
        path = self._paths.setdefault(seq.seq_id, [])
        for i in range(len(path), min(seq.num_computed_tokens, seq.num_tokens) // self.block_size):
            parent, tokens = path[-1] if path else self._root(seq), self._tokens(seq, i)
            if (node := parent.children.get(tokens)) is None:
                node = parent.children[tokens] = Node(seq.block_table[i], tokens, parent, parent.is_lost)
                self._num_unused += 1
            self._hold(node)
            path.append(node)

    def free(self, seq: Sequence) -> None:
        """Nodes stay findable, private blocks become blank."""
        path = self._paths.pop(seq.seq_id, [])
        nodes = [node.block_id for node in path] + [-1] * (len(seq.block_table) - len(path))
        self._blank += [block for block, node in zip(seq.block_table, nodes, strict=True) if block != node]
        for node in reversed(path):
            self._release(node)
        seq.block_table.clear()
        if seq.status is SequenceStatus.WAITING:
            seq.num_computed_tokens = 0

    def reset(self) -> None:
        """Unused nodes become blank, the others are lost: they become blank when they are given back."""
        nodes = list(self._roots.values())
        for node in nodes:  # grows while it is walked through
            nodes += node.children.values()
            node.is_lost = True
        unused = [node.block_id for node in nodes if node.parent and not node.num_holders]
        self._blank += unused
        self._num_unused -= len(unused)
        self._roots, self._leaves, self._stats = {}, [], PrefixCacheStats()

    @property
    def stats(self) -> PrefixCacheStats:
        """Counted at admission."""
        return self._stats

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._blank) + self._num_unused

    @staticmethod
    def slots(block_table: list[int], block_size: int, start: int, end: int) -> npt.NDArray[np.int64]:
        """Block * block_size + offset for each token, [end - start]."""
        block, offset = np.divmod(np.arange(start, end), block_size)
        return np.asarray(block_table, np.int64)[block] * block_size + offset

    def _root(self, seq: Sequence) -> Node:
        return self._roots.setdefault(seq.request.cache_salt, Node(-1, b"", None))

    def _tokens(self, seq: Sequence, i: int) -> bytes:
        return seq.tokens(i * self.block_size, (i + 1) * self.block_size).tobytes()

    def _hold(self, node: Node) -> None:
        self._num_unused -= node.num_holders == 0
        node.num_holders += 1

    def _release(self, node: Node) -> None:
        node.num_holders -= 1
        if node.num_holders:
            return
        if node.is_lost:
            self._blank.append(node.block_id)
            return
        self._num_unused += 1
        node.last_use = next(self._clock)
        self._offer(node)

    def _offer(self, node: Node) -> None:
        """Let an unused leaf be given up, when its turn comes."""
        if node.parent and not node.children and not node.num_holders:
            heapq.heappush(self._leaves, (node.last_use, node.block_id, node))

    def _take(self) -> int:
        """A block to write to: a blank one, or that of the leaf that was unused for longest."""
        if self._blank:
            return self._blank.pop()
        while True:  # what has been used again since, or given up, is passed over
            last_use, _, node = heapq.heappop(self._leaves)
            if node.parent and last_use == node.last_use and not node.children and not node.num_holders:
                break
        parent, node.parent = node.parent, None
        del parent.children[node.tokens]
        self._num_unused -= 1
        self._stats.evictions += 1
        self._offer(parent)
        return node.block_id

    def _count(self, seq: Sequence) -> None:
        hit, prefix = seq.num_computed_tokens, cached_prefix_of(seq)
        self._stats.requests += 1
        self._stats.requests_hit += hit > 0
        self._stats.tokens += seq.num_tokens
        self._stats.tokens_hit += hit
        prefix.num_hit_tokens = hit if prefix.num_hit_tokens is None else prefix.num_hit_tokens
