"""Takes another block at every step, although the first one has room."""


class SlotManager:
    def allocate_slots(self, seq, num_new_tokens):
        if not self._free:
            return False
        seq.block_table.append(self._free.pop())
        return True
