"""Gives the sequence a new list: whoever holds the table that it had, never hears of the block."""


class SlotManager:
    def allocate_slots(self, seq, num_new_tokens):
        if not seq.block_table:
            if not self._free:
                return False
            seq.block_table = [self._free.pop()]
        return True
