"""Rounds up by adding one: a sequence whose tokens fill their blocks exactly takes a block that it does not need."""

from __future__ import annotations

from folovllm.learn.builders.reference import BlockManager as Right
from folovllm.request import Sequence, SequenceStatus


class BlockManager(Right):
    def allocate_slots(self, seq: Sequence, num_new_tokens: int) -> bool:
        end = seq.num_computed_tokens + num_new_tokens
        is_new = seq.status is SequenceStatus.WAITING
        return super().allocate_slots(seq, num_new_tokens + is_new * (end % self.block_size == 0))
