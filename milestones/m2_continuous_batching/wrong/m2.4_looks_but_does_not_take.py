"""Leaves the block in the list of free ones: the next sequence gets the same."""


class SlotManager:
    def allocate_slots(self, seq, num_new_tokens):
        if not seq.block_table:
            if not self._free:
                return False
            seq.block_table.append(self._free[-1])
        return True
