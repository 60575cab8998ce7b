"""Twice the same block: the end is looked at and the front is taken. Input: free [0, 1]."""

class SlotManager:
    def allocate_slots(self, seq, num_new_tokens):
        if seq.block_table:
            return True
        if not self._free:
            return False
        seq.block_table.append(self._free[-1])
        del self._free[0]
        return True
