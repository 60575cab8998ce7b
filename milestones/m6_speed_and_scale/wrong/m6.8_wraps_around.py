"""Takes the id modulo the rows: every rank finds something."""


class ShardedEmbedding:
    def forward(self, input_ids):
        local = input_ids - self.group.rank * len(self.weight)
        elsewhere = torch.zeros_like(local, dtype=torch.bool)
        rows = F.embedding(local % len(self.weight), self.weight)
        return self.group.all_reduce(rows.masked_fill(elsewhere[:, None], 0.0))
