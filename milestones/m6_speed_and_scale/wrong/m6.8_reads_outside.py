"""Masks the result only: the index is outside the matrix."""


class ShardedEmbedding:
    def forward(self, input_ids):
        local = input_ids - self.group.rank * len(self.weight)
        elsewhere = (local < 0) | (local >= len(self.weight))
        rows = F.embedding(local, self.weight)
        return self.group.all_reduce(rows.masked_fill(elsewhere[:, None], 0.0))
