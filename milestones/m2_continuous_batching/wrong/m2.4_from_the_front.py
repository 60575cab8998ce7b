"""Takes the block from the front: that moves all that are behind it, and the block that was freed last, still warm, waits longest."""


class SlotManager:
    def allocate_slots(self, seq, num_new_tokens):
        if not seq.block_table:
            if not self._free:
                return False
            seq.block_table.append(self._free.pop(0))
        return True
