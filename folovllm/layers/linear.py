"""Linear layers, named for the dimension along which several GPUs will share them; on one rank they are whole."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn


class LinearBase(nn.Module):
    """y = x W^T + b, with W [output_size, input_size]. The weights are uninitialised until a checkpoint fills them."""

    def __init__(self, input_size: int, output_size: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(output_size, input_size))
        self.bias = nn.Parameter(torch.empty(output_size)) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, input_size] -> [T, output_size]."""
        return F.linear(x, self.weight, self.bias)


class ColumnParallelLinear(LinearBase):
    """Shared along its outputs: each rank computes some of them from the whole input."""


class RowParallelLinear(LinearBase):
    """Shared along its inputs: each rank holds some of them, and the partial results are added up."""


class MergedColumnParallelLinear(ColumnParallelLinear):
    """Several layers that read the same input, stacked: one large matrix product instead of several small ones.

    Rows of `weight` follow `output_sizes`, so that splitting it by them gives views of the parts.
    """

    def __init__(self, input_size: int, output_sizes: Sequence[int], bias: bool = False) -> None:
        super().__init__(input_size, sum(output_sizes), bias)
        self.output_sizes = list(output_sizes)


class QKVParallelLinear(MergedColumnParallelLinear):
    """The query, key and value projections, stacked in this order."""

    def __init__(self, hidden_size: int, num_heads: int, num_kv_heads: int, head_dim: int, bias: bool = False) -> None:
        sizes = (num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim)
        super().__init__(hidden_size, sizes, bias)
