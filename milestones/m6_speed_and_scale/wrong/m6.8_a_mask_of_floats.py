"""Multiplies by a mask of float32: the sum, and all of a bfloat16 model behind it, gets float32 numbers."""


class ShardedEmbedding:
    def forward(self, input_ids):
        local = input_ids - self.group.rank * len(self.weight)
        here = (local >= 0) & (local < len(self.weight))
        rows = F.embedding(local * here, self.weight)
        return self.group.all_reduce(rows * here.float()[:, None])
