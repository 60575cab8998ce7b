"""Writes every share to the beginning of its sequence's block: a decoded token overwrites the prompt's first K/V."""


class InputBatch:
    def flatten(self, shares):
        ends = np.cumsum([share.num_new_tokens for share in shares])
        tables = [self.block_tables[share.row] for share in shares]
        slots = [self._slots(table, self._block_size, 0, s.num_new_tokens) for table, s in zip(tables, shares, strict=True)]
        return RaggedArrays(
            input_ids=np.concatenate([share.token_ids for share in shares]).astype(np.int64),
            positions=np.concatenate([np.arange(share.start, share.end) for share in shares]),
            slot_mapping=np.concatenate(slots),
            query_start_loc=np.concatenate([[0], ends]),
            logits_indices=ends - 1,
        )
