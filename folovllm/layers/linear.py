"""Linear layers, named for how GPUs will share them, and the linear methods that create, load and apply their weights."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

FLOATS = ("F64", "F32", "F16", "BF16")  # safetensors' names of the dtypes whose numbers are the weights themselves


class LinearMethod(ABC):
    """How a layer (`LinearBase`, below) stores, loads and uses W [outputs, inputs]: M1's is `Plain`, X2's take fewer bits.

    One object serves all layers and holds no weight. A layer may be several that are stacked, `output_sizes` rows of W each.
    `kind` is the last part of a tensor's name in the checkpoint: "weight", "bias", "weight_scale".
    """

    @abstractmethod
    def create(self, layer: LinearBase) -> None:
        """Give the layer its parameters, uninitialised, from its `input_size` and `output_sizes`."""

    @abstractmethod
    def weight_views(self, layer: LinearBase) -> dict[str, Sequence[torch.Tensor]]:
        """Where a checkpoint's tensors go: the last part of a name -> for each of `output_sizes` a view to copy to."""

    def stored(self, kind: str) -> tuple[str, ...]:
        """The dtypes, by safetensors' names, that a checkpoint may have such a tensor in."""
        return FLOATS

    def loaded(self, layer: LinearBase) -> None:
        """Repack the weights after all of them were loaded. `weight_views` is not called again."""

    @abstractmethod
    def product(self, layer: LinearBase, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """x W^T + b, [T, inputs] -> [T, outputs]. M4: added to `residual` if given, which may be written over."""

    def apply(self, layer: LinearBase, x: torch.Tensor) -> torch.Tensor:
        """x W^T + b, [T, inputs] -> [T, outputs]: what `forward` calls. A subclass may take a faster kernel than `product`."""
        return self.product(layer, x)


class Plain(LinearMethod):
    """Keeps `weight` [outputs, inputs]; the library multiplies by it."""

    def create(self, layer: LinearBase) -> None:
        """Make one parameter, whose rows follow `output_sizes`, on the device and in the dtype that `build_model` made the default."""
        layer.weight = nn.Parameter(torch.empty(sum(layer.output_sizes), layer.input_size))

    def weight_views(self, layer: LinearBase) -> dict[str, Sequence[torch.Tensor]]:
        """The rows of each part."""
        return {"weight": torch.split(layer.weight.data, layer.output_sizes)}

    def product(self, layer: LinearBase, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """Multiply; add the bias, and the product to `residual` in place if that is given."""
        if residual is None:
            return F.linear(x, layer.weight, layer.bias)
        residual = residual.addmm_(x, layer.weight.t())
        return residual if layer.bias is None else residual.add_(layer.bias)


PLAIN = Plain()


class LinearBase(nn.Module):
    """y = x W^T + b, with W [sum(output_sizes), input_size], stored on the layer as its `linear_method` has it.

    Several `output_sizes` are several layers that read the same input, stacked: one large product instead of small ones.
    """

    weight: torch.Tensor  # what most linear methods call their parameter, uninitialised until a checkpoint fills it
    scale: torch.Tensor  # X2: a weight is its quantized value times this
    columns: torch.Tensor | None  # X2: factors [inputs] of `x` that could not be folded into quantized weights
    dtype: torch.dtype  # X2: of `x`, where the weight has another

    def __init__(
        self, input_size: int, output_sizes: Sequence[int], bias: bool = False, linear_method: LinearMethod = PLAIN
    ) -> None:
        super().__init__()
        self.input_size, self.output_sizes, self.linear_method = input_size, list(output_sizes), linear_method
        linear_method.create(self)
        self.bias = nn.Parameter(torch.empty(sum(output_sizes))) if bias else None

    def weight_views(self) -> dict[str, Sequence[torch.Tensor]]:
        """Where a checkpoint's tensors go (`LinearMethod.weight_views`), the bias too."""
        bias = {} if self.bias is None else {"bias": torch.split(self.bias.data, self.output_sizes)}
        return self.linear_method.weight_views(self) | bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, input_size] -> [T, outputs]."""
        return self.linear_method.apply(self, x)


class ColumnParallelLinear(LinearBase):
    """Sharded along its outputs: each rank computes some of them from the whole input."""


class RowParallelLinear(LinearBase):
    """Sharded along its inputs: each rank holds some of them, and the partial results are added up."""

    def __init__(
        self, input_size: int, output_size: int, bias: bool = False, linear_method: LinearMethod = PLAIN
    ) -> None:
        super().__init__(input_size, [output_size], bias, linear_method)


class MergedColumnParallelLinear(ColumnParallelLinear):
    """Several layers in one. Splitting the result by `output_sizes` gives their results, as views."""


class QKVParallelLinear(MergedColumnParallelLinear):
    """The query, key and value projections, stacked in this order."""

    def __init__(
        self, hidden_size: int, num_heads: int, num_kv_heads: int, head_dim: int, bias: bool = False,
        linear_method: LinearMethod = PLAIN,
    ) -> None:  # fmt: skip
        sizes = (num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim)
        super().__init__(hidden_size, sizes, bias, linear_method)
