"""1, 2, 4, 8, ... below `max_num_seqs`: the largest batches find no graph that holds them."""

from __future__ import annotations

from folovllm.learn.builders.reference import GraphCache as Right


class GraphCache(Right):
    def __init__(self, max_num_seqs: int) -> None:
        super().__init__(max_num_seqs)
        self.widths = [2**i for i in range(max_num_seqs.bit_length())]
