"""Linear layers, named for the dimension along which several GPUs will share them; on one rank they are whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import nn

from folovllm.layers.linear_method import LinearMethod
from folovllm.layers.plain_linear import Plain

PLAIN = Plain()


class LinearBase(nn.Module):
    """y = x W^T + b, with W [sum(output_sizes), input_size], which `linear_method` keeps.

    With several `output_sizes` it is several layers that read the same input, stacked: one large matrix product instead
    of several small ones. The weights are uninitialised until a checkpoint fills them.
    """

    is_stack: ClassVar[bool] = False  # whether its parts are experts, of which each product takes some
    weight: torch.Tensor  # what most linear methods call their parameter
    scale: torch.Tensor  # and what its codes are multiples of
    grouped: Any  # what else a linear method keeps
    columns: torch.Tensor | None  # factors [inputs] of `x` that a linear method could not fold into its codes
    dtype: torch.dtype  # of `x`, where the weight has another

    def __init__(
        self, input_size: int, output_sizes: Sequence[int], bias: bool = False, linear_method: LinearMethod = PLAIN
    ) -> None:
        super().__init__()
        self.input_size, self.output_sizes, self.linear_method = input_size, list(output_sizes), linear_method
        linear_method.create(self)
        self.bias = nn.Parameter(torch.empty(sum(output_sizes))) if bias else None

    def places(self) -> dict[str, Sequence[torch.Tensor]]:
        """Where a checkpoint's tensors go (`LinearMethod.places`), the bias too."""
        bias = {} if self.bias is None else {"bias": torch.split(self.bias.data, self.output_sizes)}
        return self.linear_method.places(self) | bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, input_size] -> [T, outputs]."""
        return self.linear_method.apply(self, x)

    def fused(
        self,
        x: torch.Tensor,
        norm_eps: float | None = None,
        gated: bool = False,
        residual: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Multiply with a norm before it, or a gate or an addition after it (`LinearMethod.apply`)."""
        return self.linear_method.apply(self, x, norm_eps, gated, residual)

    def fuses(self, x: torch.Tensor) -> bool:
        """Whether `fused` is one kernel for this batch."""
        return self.linear_method.fuses(self, x)


class ColumnParallelLinear(LinearBase):
    """Shared along its outputs: each rank computes some of them from the whole input."""


class RowParallelLinear(LinearBase):
    """Shared along its inputs: each rank holds some of them, and the partial results are added up."""

    def __init__(
        self, input_size: int, output_size: int, bias: bool = False, linear_method: LinearMethod = PLAIN
    ) -> None:
        super().__init__(input_size, [output_size], bias, linear_method)


class MergedColumnParallelLinear(ColumnParallelLinear):
    """Several layers in one. Splitting the result by `output_sizes` gives views of theirs."""


class QKVParallelLinear(MergedColumnParallelLinear):
    """The query, key and value projections, stacked in this order."""

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        bias: bool = False,
        linear_method: LinearMethod = PLAIN,
    ) -> None:
        sizes = (num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim)
        super().__init__(hidden_size, sizes, bias, linear_method)
