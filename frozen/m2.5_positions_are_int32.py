"""Positions in int32. Input: any."""

class InputBatch:
    def flatten(self, scheduled_seqs):
        starts = [s.start for s in scheduled_seqs]
        counts = np.array([s.num_new_tokens for s in scheduled_seqs], np.int64)
        ids = np.concatenate([s.token_ids for s in scheduled_seqs]).astype(np.int64)
        positions = np.concatenate([np.arange(s.start, s.end, dtype=np.int32) for s in scheduled_seqs])
        slots = np.concatenate([self._slots(self.block_tables[s.row], self._block_size, s.start, s.end) for s in scheduled_seqs]).astype(np.int64)
        loc = np.concatenate([[0], counts.cumsum()]).astype(np.int64)
        return RaggedArrays(ids, positions, slots, loc, loc[1:] - 1)
