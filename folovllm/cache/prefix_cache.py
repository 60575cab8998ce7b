"""Prefix caching: blocks keep their K/V after they are freed, named by a chain of hashes, and are found again.

The K/V of a token depends on all tokens before it. So a full block is named by a hash of its own tokens *and* of the
block before it, which makes equal names mean equal prefixes (vLLM's automatic prefix caching).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable

import xxhash

from folovllm.cache.block_manager import Block, BlockManager
from folovllm.cache.cached_prefix import CachedPrefix, PrefixCacheStats
from folovllm.cache.connector import KVConnector
from folovllm.engine.event_stream import Events
from folovllm.engine.events import BlockAdopted, BlockCached, BlockEvicted, PrefixHit
from folovllm.request import Sequence, SequenceStatus
from folovllm.step.schedule import TokenIds

ROOT = 0  # the parent of every first block


def compute_hash(token_ids: TokenIds, prefix: int) -> int:
    """The hash of a full block: xxh64 of the hash of the block before it and of its own tokens.

    Args:
        token_ids: the block's tokens, [B] int32.
        prefix: the hash of the block before it; for a first block, that of the tenant's salt, or 0.

    Returns:
        64 bits, unsigned: `xxhash.xxh64` over the 8 bytes of `prefix` (little endian) followed by the tokens' bytes.
    """
    return xxhash.xxh64_intdigest(prefix.to_bytes(8, "little") + token_ids.tobytes())


class PrefixCache:
    """Full blocks by their hash.

    A 64-bit hash can collide, and a block served by mistake would be silently wrong text. So a hit must also have the
    same tokens and the same parent. Parents are compared by serial number: each publication gets a new one, so a block
    can only follow the very block after which it was computed (or one of the same name, tokens and parent).
    """

    def __init__(self, block_size: int, events: Events | None = None) -> None:
        self._block_size = block_size
        self._events = Events() if events is None else events
        self._by_hash: dict[int, Block] = {}
        self._serials = itertools.count(ROOT + 1)
        self.root: Callable[[str | None], int] = _salt_hash  # what stands before a first block, by the request's salt
        self.stats = PrefixCacheStats()

    def __len__(self) -> int:
        return len(self._by_hash)

    def longest_cached_prefix(self, seq: Sequence) -> list[Block]:
        """The cached blocks with which `seq` may begin, in order.

        A full block of `seq` is cached if `self._by_hash` has a block of its hash, with the same tokens, whose `parent` is the
        `serial` of the block before it (`ROOT` for the first). What comes after a block that is not cached depends on tokens
        that are not there, and does not count. At least one token is left to compute: its logits give the next token.
        """
        found: list[Block] = []
        parent = ROOT
        for i in range((seq.num_tokens - 1) // self._block_size):
            block = self._by_hash.get(self._hash(seq, i))
            if block is None or block.parent != parent or block.token_ids != self._tokens(seq, i):
                break
            found.append(block)
            parent = block.serial
        return found

    def cache_blocks(self, seq: Sequence, blocks: list[Block]) -> None:
        """Name the full, computed blocks of `seq` that have no name yet, so that others can find them.

        Args:
            blocks: the blocks of `seq` in order, of which those from `len(self.serials(seq))` on are new; all full.

        A name is a hash. Its owner has as `parent` the serial of the block before it, or `ROOT`. A block whose name belongs
        to one with another parent takes it over (`self._name`). A twin has the same parent and tokens and was computed at the same
        time: it keeps the name, and this block stays nameless, for a running sequence is never moved to other blocks. The
        same parent and other tokens are a collision: this block and all after it stay unpublished.

        `self.serials(seq)` gets the serial of the owner of the name, for each block that has or shares one.
        """
        serials = self.serials(seq)
        for i in range(len(serials), len(blocks)):
            parent = serials[-1] if i else ROOT
            named = self._by_hash.get(self._hash(seq, i))
            if named is None or named.parent != parent:
                named = self._name(blocks[i], seq, i, parent)
            elif named.token_ids != self._tokens(seq, i):
                return
            serials.append(named.serial)

    def evict(self, block: Block) -> None:
        """Forget what a block holds, for it is about to hold something else.

        Its name leaves `self._by_hash`; its `hash`, `token_ids`, `serial` and `parent` become those of a new `Block`:
        None, b"", 0 and 0. `self.stats.evictions` counts it. Without any effect if the block has no name (`hash` is None).
        """
        if block.hash is not None:
            del self._by_hash[block.hash]
            block.hash, block.token_ids, block.serial, block.parent = None, b"", 0, 0
            self.stats.evictions += 1

    def reset(self) -> None:
        """Forget everything, as after a change of the weights."""
        for block in list(self._by_hash.values()):
            self.forget(block)
        self.stats = PrefixCacheStats()

    def forget(self, block: Block) -> None:
        """Evict what a block holds, if it has a name, and say so."""
        hash_ = block.hash
        self.evict(block)
        if self._events.on and hash_ is not None and block.hash is None:
            self._events.emit(BlockEvicted(block.block_id, hash_))

    def _name(self, block: Block, seq: Sequence, i: int, parent: int) -> Block:
        """Give `block` the name of block i of `seq`; a block that had it loses it."""
        hash_ = self._hash(seq, i)
        if (other := self._by_hash.get(hash_)) is not None:
            self.forget(other)
        block.hash, block.token_ids = hash_, self._tokens(seq, i)
        block.serial, block.parent = next(self._serials), parent
        self._by_hash[hash_] = block
        if self._events.on:
            self._events.emit(BlockCached(block.block_id, seq.seq_id, i, hash_, block.serial, parent))
        return block

    def serials(self, seq: Sequence) -> list[int]:
        """Serial numbers of the blocks of `seq` that are published, in order, while it holds them."""
        return cached_prefix_of(seq).serials

    def names(self, seq: Sequence) -> CachedPrefix:
        """The hashes and tokens of all full blocks of `seq`."""
        return self._named(seq, seq.num_tokens // self._block_size - 1)

    def _hash(self, seq: Sequence, i: int) -> int:
        """The hash of block i, a full one."""
        return self._named(seq, i).hashes[i]

    def _tokens(self, seq: Sequence, i: int) -> bytes:
        """The tokens of block i, a full one: int32, as bytes."""
        return self._named(seq, i).tokens[i]

    def root_of(self, seq: Sequence) -> int:
        """Return the hash before the first block of `seq`, which it keeps from the first time it is needed."""
        notes = cached_prefix_of(seq)
        if notes.root is None:
            notes.root = self.root(seq.request.cache_salt)
        return notes.root

    def _named(self, seq: Sequence, i: int) -> CachedPrefix:
        """The cached prefix of `seq`, with the hash of block i. A hash is made once, since the tokens of a full block never change."""
        notes, size = seq.prefix or cached_prefix_of(seq), self._block_size
        if i >= len(notes.hashes):
            prefix = notes.hashes[-1] if notes.hashes else self.root_of(seq)
            new = seq.token_ids[len(notes.hashes) * size : seq.num_tokens // size * size]
            for block in new.reshape(-1, size):  # [B]
                prefix = compute_hash(block, prefix)
                notes.hashes.append(prefix)
                notes.tokens.append(block.tobytes())
        return notes


def cached_prefix_of(seq: Sequence) -> CachedPrefix:
    """What the prefix cache knows of `seq`, nothing the first time."""
    if seq.prefix is None:
        seq.prefix = CachedPrefix()
    return seq.prefix


def _salt_hash(salt: str | None) -> int:
    return 0 if salt is None else xxhash.xxh64_intdigest(salt.encode())


class PrefixCachingBlockManager(BlockManager):
    """A `BlockManager` whose freed blocks can be found again until they are needed for something else.

    The free list is then the queue for eviction: least recently freed first, a sequence's tail before its beginning.

    Attributes:
        connector: hears of blocks that are evicted, and of sequences that end; None: nobody does.
    """

    connector: KVConnector | None = None

    def __init__(self, num_blocks: int, block_size: int, events: Events | None = None) -> None:
        super().__init__(num_blocks, block_size, events)
        self.prefix_cache = PrefixCache(block_size, self.events)
        self.num_recomputed = 0  # blocks at the end of a hit that are computed again, for what is kept beside their K/V

    @property
    def stats(self) -> PrefixCacheStats:
        return self.prefix_cache.stats

    def reset(self) -> None:
        self.prefix_cache.reset()
        if self.connector is not None:
            self.connector.reset()

    def get_computed_blocks(self, seq: Sequence) -> None:
        """Let a waiting sequence begin with the blocks that are cached.

        Not if its prompt still needs scores: cached tokens are not computed, so they get none.
        """
        if seq.num_unscored_tokens:
            return
        serials = self.prefix_cache.serials(seq)
        for block in self.usable(seq, self.prefix_cache.longest_cached_prefix(seq)):
            self.adopt(block)
            seq.block_table.append(block.block_id)
            serials.append(block.serial)
            if self.events.on:
                self.events.emit(BlockAdopted(block.block_id, seq.seq_id, block.ref_count))
        seq.num_computed_tokens = len(seq.block_table) * self.block_size

    def usable(self, seq: Sequence, found: list[Block]) -> list[Block]:
        """The blocks at the front of `found` with which every layer of the model can begin: all, if layers keep nothing but K/V.

        Called once for each attempt to admit `seq`, with what is cached of its prefix.
        """
        return found[: max(0, len(found) - self.num_recomputed)]

    def adopt(self, block: Block) -> None:
        """Hold a cached block for one more sequence. A block that a sequence holds is not in the free list (`self._free`)."""
        if block.ref_count == 0:
            self._free.remove(block)
        block.ref_count += 1

    def admitted(self, seq: Sequence) -> None:
        """Count an admission, and how many of its tokens were cached."""
        stats, hit = self.prefix_cache.stats, seq.num_computed_tokens
        stats.requests += 1
        stats.requests_hit += hit > 0
        stats.tokens += seq.num_tokens
        stats.tokens_hit += hit
        notes = cached_prefix_of(seq)
        notes.num_hit_tokens = hit if notes.num_hit_tokens is None else notes.num_hit_tokens
        if self.events.on and hit:
            self.events.emit(PrefixHit(seq.seq_id, hit))

    def cache_scheduled_blocks(self, seqs: Iterable[Sequence]) -> None:
        """Name the blocks that the coming step will fill, so that others can begin with them in this very step.

        A layer stores the K/V of the whole step before it attends, so a sequence that finds them reads what is written.
        """
        for seq in seqs:
            self.cache_blocks(seq)

    def cache_blocks(self, seq: Sequence) -> None:
        """Name the blocks whose tokens are known and whose K/V is written, now or by a step that is on its way."""
        num_full = min(seq.num_computed_tokens, seq.num_tokens) // self.block_size
        if num_full > (0 if seq.prefix is None else len(seq.prefix.serials)):
            self.prefix_cache.cache_blocks(seq, [self.blocks[i] for i in seq.block_table[:num_full]])

    def free(self, seq: Sequence) -> None:
        """Take the blocks back; they stay findable."""
        if self.connector is not None and seq.status.is_finished:
            self.connector.request_finished(seq, seq.block_table)
        super().free(seq)
        self.prefix_cache.serials(seq).clear()
        if seq.status is SequenceStatus.WAITING:
            seq.num_computed_tokens = 0

    def _take(self) -> int:
        """Take the least recently used block, and forget what it held."""
        block_id = super()._take()
        if self.connector is not None and self.blocks[block_id].hash is not None:
            self.connector.block_evicted(self.blocks[block_id])
        self.prefix_cache.forget(self.blocks[block_id])
        return block_id
