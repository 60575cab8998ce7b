"""Takes blocks as long as there are any, and says False when they run out: what was taken is not given back."""

from __future__ import annotations

from folovllm.learn.builders.reference import BlockManager as Right
from folovllm.request import Sequence


class BlockManager(Right):
    def allocate_slots(self, seq: Sequence, num_new_tokens: int) -> bool:
        needed = -(-(seq.num_computed_tokens + num_new_tokens) // self.block_size)
        while len(seq.block_table) < needed:
            if self._num_free == 0:
                return False
            self._num_free -= 1
            seq.block_table.append(int(self._stack[self._num_free]))
        self._holders.add(seq.seq_id)
        return True
