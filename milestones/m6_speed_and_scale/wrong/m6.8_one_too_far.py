"""The first id of the next rank counts as one's own."""


class ShardedEmbedding:
    def forward(self, input_ids):
        local = input_ids - self.group.rank * len(self.weight)
        elsewhere = (local < 0) | (local > len(self.weight))
        rows = F.embedding(local.masked_fill(elsewhere, 0), self.weight)
        return self.group.all_reduce(rows.masked_fill(elsewhere[:, None], 0.0))
