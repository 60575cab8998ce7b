"""Looks for a free block before asking whether one is needed: when the cache is full, those who run stop too."""


class SlotManager:
    def allocate_slots(self, seq, num_new_tokens):
        if not self._free:
            return False
        if not seq.block_table:
            seq.block_table.append(self._free.pop())
        return True
