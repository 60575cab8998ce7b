"""Writes every share to the beginning of its sequence's block: a decoded token overwrites the prompt's first K/V."""


class InputBatch:
    def flatten(self, items):
        spans = [(item.seq, item.start, item.start + item.num_new_tokens) for item in items]
        ends = np.cumsum([item.num_new_tokens for item in items])
        return RaggedArrays(
            input_ids=np.concatenate([seq.token_ids[start:end] for seq, start, end in spans]).astype(np.int64),
            positions=np.concatenate([np.arange(start, end) for _, start, end in spans]),
            slot_mapping=np.concatenate(
                [self._slots(seq.block_table, self._block_size, 0, end - start) for seq, start, end in spans]
            ),
            query_start_loc=np.concatenate([[0], ends]),
            logits_indices=ends - 1,
        )
