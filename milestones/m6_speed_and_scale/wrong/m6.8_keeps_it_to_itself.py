"""Does not add up: every rank goes on with its own part."""


class ShardedEmbedding:
    def forward(self, input_ids):
        local = input_ids - self.group.rank * len(self.weight)
        elsewhere = (local < 0) | (local >= len(self.weight))
        rows = F.embedding(local.masked_fill(elsewhere, 0), self.weight)
        return rows.masked_fill(elsewhere[:, None], 0.0)
