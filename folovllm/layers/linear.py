"""Linear layers, and the linear methods that create, load and apply their weights (strategy pattern).

The layers are named for the dimension along which several GPUs will share them; on one rank they are whole.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from folovllm.layers.activation import SiluAndMul

if TYPE_CHECKING:
    from folovllm.distributed.group import Group
    from folovllm.distributed.sharding import Weight

    Cut = Callable[[Weight], torch.Tensor]  # a whole tensor [outputs, inputs] or [outputs] -> one rank's part of it

ALL = slice(None)
FLOATS = ("F64", "F32", "F16", "BF16")  # safetensors' names of the dtypes whose numbers are the weights themselves


class LinearMethod(ABC):
    """How W [outputs, inputs] is stored, loaded, cut and used; one object serves all layers and holds no weight.

    A new linear method is a subclass with `create`, `places` and `product`. The bias is the layer's own business. `kind` is the last
    part of a tensor's name in the checkpoint: "weight", "bias", "weight_scale".
    """

    ignores: ClassVar[tuple[str, ...]] = ()  # kinds of tensors that a checkpoint may hold and the product does not need

    @abstractmethod
    def create(self, layer: LinearBase) -> None:
        """Give the layer its parameters, uninitialised, from its `input_size` and `output_sizes`."""

    @abstractmethod
    def places(self, layer: LinearBase) -> dict[str, Sequence[torch.Tensor]]:
        """Where a checkpoint's tensors go: the last part of a name -> for each of `output_sizes` a view to copy to."""

    def stored(self, kind: str) -> tuple[str, ...]:
        """The dtypes, by safetensors' names, that a checkpoint may have such a tensor in."""
        return FLOATS

    def check_ignored(self, name: str, tensor: torch.Tensor) -> None:
        """Raise ValueError if a tensor of a kind in `ignores` says what the product would need after all."""

    def arrange(self, kind: str, tensor: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """The tensor that was read (and cut) as its place, a view of this `shape`, takes it."""
        return tensor

    def fill(self, kind: str, tensor: torch.Tensor, generator: torch.Generator) -> None:
        """Make up a whole tensor as a checkpoint would have it, so that weights are about N(0, 0.02)."""
        tensor.normal_(0.0, 0.02, generator=generator)

    def num_bytes(self, outputs: int, inputs: int, dtype: torch.dtype) -> int:
        """What W takes of a card's memory; `dtype` is the model's."""
        return outputs * inputs * dtype.itemsize

    def loaded(self, layer: LinearBase) -> None:
        """Repack the weights after all of them were loaded. `places` is not called again."""

    def check_part(self, outputs: int, inputs: int) -> None:
        """Raise ValueError unless a rank can have a part of [outputs, inputs]. The message completes a sentence about the layer."""

    def shard(self, kind: str, tensor: Weight, cut: Cut) -> torch.Tensor:
        """Return one rank's part of a checkpoint's tensor.

        `cut` reads `shape` and takes a slice of outputs, or of inputs. A tensor in another layout is wrapped first
        (`distributed.sharding.Weight`).
        """
        return cut(tensor)

    @abstractmethod
    def product(self, layer: LinearBase, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """x W^T + b, [T, inputs] -> [T, outputs]; added to `residual`, which may be written over, where there is one."""

    def apply(
        self,
        layer: LinearBase,
        x: torch.Tensor,
        norm_eps: float | None = None,
        gated: bool = False,
        residual: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Multiply, with what comes before and after it.

        Args:
            norm_eps: first divide each row of `x` by its root mean square (RMSNorm without its weight).
            gated: the outputs are gate and up; the result is silu(gate) * up, [T, outputs / 2]. Never with `residual`.
            residual: [T, outputs], to be added; it may be written over.
        """
        if self.fuses(layer, x):
            return self.fused(layer, x, norm_eps, gated, residual)
        if norm_eps is not None:
            x = F.rms_norm(x, x.shape[-1:], eps=norm_eps)
        result = self.product(layer, x, residual)
        return SiluAndMul()(result) if gated else result

    def fuses(self, layer: LinearBase, x: torch.Tensor) -> bool:
        """Whether `apply` does all that it is asked for `x` in one kernel (`fused`). If not, the caller may use another kernel."""
        return False

    def fused(
        self, layer: LinearBase, x: torch.Tensor, norm_eps: float | None, gated: bool, residual: torch.Tensor | None
    ) -> torch.Tensor:
        """Do what `apply` promises in one kernel. Called only where `fuses` said so."""
        raise NotImplementedError(f"{type(self).__name__} has no such kernel")

    def summed(
        self, layer: LinearBase, x: torch.Tensor, group: Group, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Multiply a rank's inputs, and add up over ranks: [T, outputs] on all of them. `residual`, as of `apply`, is added once."""
        total = group.all_reduce(self.apply(layer, x))
        return total if residual is None else residual.add_(total)

    def check_stack(self, layer: LinearBase) -> None:
        """Raise ValueError unless the parts of `layer` can be used one by one, as experts are. This one always raises.

        The message completes a sentence of the caller.
        """
        raise ValueError(f"{type(self).__name__} does not unpack a part of a layer")

    def dequantized(self, layer: LinearBase, dtype: torch.dtype, parts: slice = ALL) -> torch.Tensor:
        """W [outputs, inputs] of some of the `output_sizes` in `dtype`, a copy. Works after `check_stack`."""
        raise NotImplementedError(f"{type(self).__name__} does not unpack")

    def grouped_product(
        self,
        layer: LinearBase,
        x: torch.Tensor,
        num_experts: int,
        order: torch.Tensor,
        starts: torch.Tensor,
        gated: bool = False,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Multiply each token by the matrices of its experts, which are the parts of `layer`. Works after `check_stack`.

        Args:
            x: [T, inputs], or [pairs, inputs] where each (token, expert) pair has a row of its own.
            order, starts: the pairs sorted by expert, and where each expert's begin (`moe.layers.sort_by_expert`).
            gated: an expert is two parts, gate and up; the result is silu(gate) * up.
            out: [pairs, outputs] to write to. Rows of pairs whose expert is elsewhere stay as they are.

        Returns:
            [pairs, outputs], in the order of pairs, not of experts.
        """
        raise NotImplementedError(f"{type(self).__name__} has no such kernel")

    def can_fold(self, layer: LinearBase) -> bool:
        """Whether `fold` works, and the product of an `x` that is divided only afterwards is as exact."""
        return False

    def fold(self, layer: LinearBase, scale: torch.Tensor) -> None:
        """Multiply the columns of W by `scale` [inputs], for good: (x * scale) W^T is x (W * scale)^T."""
        raise NotImplementedError(f"{type(self).__name__} cannot fold")


class Plain(LinearMethod):
    """Keeps `weight` [outputs, inputs]; the library multiplies by it."""

    def create(self, layer: LinearBase) -> None:
        """Make one parameter, whose rows follow `output_sizes`."""
        layer.weight = nn.Parameter(torch.empty(sum(layer.output_sizes), layer.input_size))

    def places(self, layer: LinearBase) -> dict[str, Sequence[torch.Tensor]]:
        """The rows of each part."""
        return {"weight": torch.split(layer.weight.data, layer.output_sizes)}

    def product(self, layer: LinearBase, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """Multiply. Without a bias the addition is part of the library's product."""
        if residual is None:
            return F.linear(x, layer.weight, layer.bias)
        residual = residual.addmm_(x, layer.weight.t())
        return residual if layer.bias is None else residual.add_(layer.bias)

    def can_fold(self, layer: LinearBase) -> bool:
        """False with a bias, which a late division would scale, and in float16.

        Before it is divided, a result may be larger than float16 can hold.
        """
        return layer.bias is None and layer.weight.dtype != torch.float16

    def fold(self, layer: LinearBase, scale: torch.Tensor) -> None:
        layer.weight.data *= scale


PLAIN = Plain()


class LinearBase(nn.Module):
    """y = x W^T + b, with W [sum(output_sizes), input_size], stored on the layer as its `linear_method` has it.

    With several `output_sizes` it is several layers that read the same input, stacked: one large matrix product instead
    of several small ones. The weights are uninitialised until a checkpoint fills them.
    """

    is_stack: ClassVar[bool] = False  # whether its parts are experts, of which each product takes some
    weight: torch.Tensor  # what most linear methods call their parameter
    scale: torch.Tensor  # a weight is its quantized value times this
    grouped: Any  # what else a linear method keeps
    columns: (
        torch.Tensor | None
    )  # factors [inputs] of `x` that a linear method could not fold into its quantized weights
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


class RankSum(nn.Module):
    """Adds up what the ranks computed, for layers that are no linear layer. Here there is one rank; for several: `layers.sharded`."""

    rank, size = 0, 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's part of a sum [T, H] -> the sum."""
        return x
