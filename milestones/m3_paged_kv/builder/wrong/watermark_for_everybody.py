"""The watermark holds for running sequences too: the blocks that were left for them are never given to them."""

from __future__ import annotations

from folovllm.learn.builders.reference import BlockManager as Right
from folovllm.request import Sequence


class BlockManager(Right):
    def allocate_slots(self, seq: Sequence, num_new_tokens: int) -> bool:
        needed = -(-(seq.num_computed_tokens + num_new_tokens) // self.block_size)
        missing = needed - len(seq.block_table)
        if missing > 0 and missing + len(self._holders - {seq.seq_id}) > self._num_free:
            return False
        return super().allocate_slots(seq, num_new_tokens)
