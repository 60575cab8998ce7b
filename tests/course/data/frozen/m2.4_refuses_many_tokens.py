"""Refuses more new tokens than there are free blocks. Input: 5 tokens, 2 free blocks."""

class SlotManager:
    def allocate_slots(self, seq, num_new_tokens):
        if seq.block_table:
            return True
        if len(self._free) < min(num_new_tokens, 3):
            return False
        seq.block_table.append(self._free.pop())
        return True
