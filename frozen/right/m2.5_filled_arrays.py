"""Arrays of their full size, filled a sequence at a time."""

class InputBatch:
    def flatten(self, scheduled_seqs):
        total = sum(scheduled.num_new_tokens for scheduled in scheduled_seqs)
        ids, positions, slots = (np.empty(total, np.int64) for _ in range(3))
        loc = np.zeros(len(scheduled_seqs) + 1, np.int64)
        for i, scheduled in enumerate(scheduled_seqs):
            start, end = scheduled.start, scheduled.start + scheduled.num_new_tokens
            at = slice(loc[i], loc[i] + end - start)
            ids[at] = scheduled.token_ids
            positions[at] = range(start, end)
            slots[at] = self._slots(self.block_tables[scheduled.row], self._block_size, start, end)
            loc[i + 1] = at.stop
        return RaggedArrays(ids, positions, slots, loc, loc[1:] - 1)
