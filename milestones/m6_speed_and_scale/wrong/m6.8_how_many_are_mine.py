"""Looks up only the ids that are here. How many, the host must ask the device: no graph can capture that."""


class ShardedEmbedding:
    def forward(self, input_ids):
        local = input_ids - self.group.rank * len(self.weight)
        here = (local >= 0) & (local < len(self.weight))
        rows = self.weight.new_zeros(len(input_ids), self.weight.shape[1])
        rows[here] = self.weight[local[here]]
        return self.group.all_reduce(rows)
