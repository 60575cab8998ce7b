"""Blocks behind a sliding window, given back while their sequence still runs.

In a layer with a window a token sees the last W tokens and no more. Where every layer has one, a block that lies wholly
before the window of the next token is never read again. Where one layer sees all, every block is needed to the end.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from folovllm.cache.block_manager import BlockManager
from folovllm.cache.manager import KVCacheManager
from folovllm.cache.prefix_cache import PrefixCachingBlockManager, cached_prefix_of
from folovllm.engine.event_stream import Events
from folovllm.engine.events import BlockPassed
from folovllm.models.model_config import window_of
from folovllm.request import Sequence

if TYPE_CHECKING:
    from transformers import PretrainedConfig

GONE = -1  # in the place of a block that was given back


class SlidingBlockManager(BlockManager):
    """A `BlockManager` for models whose every layer has a window.

    Invariant: `GONE` stands in a table for the blocks whose tokens no coming step sees, and only in front of all others.
    It need not wait for a step that is under way: devices run steps in order, and only a later one writes to the block.
    A rejected draft token takes nothing back, since the window is that of a step's first token, which is not drafted.
    """

    def __init__(self, num_blocks: int, block_size: int, events: Events | None = None, *, window: int) -> None:
        super().__init__(num_blocks, block_size, events)
        self.window = window

    def allocate_slots(self, seq: Sequence, num_new_tokens: int) -> bool:
        """Give back the blocks before the window, then allocate. False if there is no room: then these blocks stay given back."""
        self.give_back(seq)
        return super().allocate_slots(seq, num_new_tokens)

    def give_back(self, seq: Sequence) -> None:
        """Give back the blocks that no coming token of `seq` sees, newest first: its beginning stays findable longest."""
        for i in reversed(range(self.num_behind(seq))):
            if seq.block_table[i] == GONE:
                return  # and all before it
            block, seq.block_table[i] = self.blocks[seq.block_table[i]], GONE
            block.ref_count -= 1
            if block.ref_count == 0:
                self._free.append(block)
            if self.events.on:
                self.events.emit(BlockPassed(seq.seq_id, i, block.block_id, block.ref_count))

    def num_behind(self, seq: Sequence) -> int:
        """Blocks that lie wholly before the window of the next token to be computed."""
        return max(0, seq.num_computed_tokens + 1 - self.window) // self.block_size

    def free(self, seq: Sequence) -> None:
        """Free the blocks that `seq` holds. Those before the window (GONE in its table) were given back before."""
        seq.block_table[:] = [block_id for block_id in seq.block_table if block_id != GONE]
        super().free(seq)


class SlidingPrefixCachingBlockManager(SlidingBlockManager, PrefixCachingBlockManager):
    """The same with prefix caching. A hit needs the whole prefix, as ever, also what is behind the window by then.

    Where the hash of a block collides, its sequence gives nothing back for a while. That ends at the latest when no block
    is free: the name that is in the way went when its block was taken.
    """

    def num_behind(self, seq: Sequence) -> int:
        """Blocks before the window that have their hash: only a block in the table can get one."""
        return min(super().num_behind(seq), len(cached_prefix_of(seq).serials))


WITH_WINDOW: dict[Callable[..., KVCacheManager], type[SlidingBlockManager]] = {
    BlockManager: SlidingBlockManager,
    PrefixCachingBlockManager: SlidingPrefixCachingBlockManager,
}


def sliding(kind: Callable[..., KVCacheManager], hf_config: PretrainedConfig) -> Callable[..., KVCacheManager]:
    """What makes the cache manager: `kind`, or if every layer of the model slides, the one that gives blocks back."""
    window = window_of(hf_config)
    return kind if kind not in WITH_WINDOW or window is None else partial(WITH_WINDOW[kind], window=window)
