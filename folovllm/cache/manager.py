"""What the scheduler asks of the owner of the KV cache."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf

import numpy as np
import numpy.typing as npt

from folovllm.cache.cached_prefix import PrefixCacheStats
from folovllm.engine.event_stream import Events
from folovllm.engine.events import BlockState
from folovllm.request import Sequence
from folovllm.step.schedule import Extras, ScheduledSequence


class KVCacheManager(ABC):
    """Owns `num_blocks` blocks of `block_size` tokens, and the block table of each sequence that holds some.

    Invariant: a block belongs to a sequence from `allocate_slots` to `free`, and the table covers every token that is
    computed or scheduled.

    Attributes:
        step_extras: what a step carries for this manager (`SchedulerOutput.extras`), asked once for each step that is decided;
            None: never anything.
    """

    step_extras: Callable[[SequenceOf[ScheduledSequence]], Extras | None] | None = None

    def __init__(self, num_blocks: int, block_size: int, events: Events | None = None) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.events = Events() if events is None else events

    def get_computed_blocks(self, seq: Sequence) -> None:
        """Let a waiting sequence adopt what is cached of its tokens already. Nothing, unless prefixes are cached."""

    @abstractmethod
    def allocate_slots(self, seq: Sequence, num_new_tokens: int) -> bool:
        """Make room for the next tokens of `seq`; False (and nothing taken) if there is none."""

    def cache_scheduled_blocks(self, seqs: Iterable[Sequence]) -> None:
        """Mark the blocks that the next step writes, those of all computed tokens of `seqs`. Does nothing unless prefixes are cached."""

    def cache_blocks(self, seq: Sequence) -> None:
        """Mark the blocks of `seq` as written: the K/V of all its computed tokens is there. Does nothing unless prefixes are cached."""

    def truncate(self, seq: Sequence) -> None:
        """Take back what was reserved beyond the computed tokens of `seq`. Nothing, where room comes in one piece."""

    @abstractmethod
    def free(self, seq: Sequence) -> None:
        """Take back all that `seq` holds; without effect if it holds nothing."""

    def reset(self) -> None:
        """Forget all cached prefixes; who holds blocks keeps them. Nothing, unless prefixes are cached."""

    @property
    def stats(self) -> PrefixCacheStats:
        """What a cache of prefixes has counted since it was made or reset; zeros without one."""
        return PrefixCacheStats()

    @property
    @abstractmethod
    def num_free(self) -> int:
        """Blocks that no sequence holds."""

    @property
    def num_used(self) -> int:
        """Blocks that sequences hold."""
        return self.num_blocks - self.num_free

    def block_states(self) -> Iterable[BlockState]:
        """The blocks that hold something, for a new listener."""
        return ()

    @staticmethod
    @abstractmethod
    def slots(block_table: list[int], block_size: int, start: int, end: int) -> npt.NDArray[np.int64]:
        """Where the K/V of tokens `start` to `end - 1` goes: block * block_size + offset, [end - start]."""
