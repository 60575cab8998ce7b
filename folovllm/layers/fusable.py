"""What ranks and fused kernels ask of a linear method: shard, sum, fuse and fold; what quantized checkpoints and budgets ask."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import nn

from folovllm.layers.activation import SiluAndMul
from folovllm.layers.linear import LinearBase, LinearMethod, Plain

if TYPE_CHECKING:
    from folovllm.distributed.group import ProcessGroup
    from folovllm.distributed.sharding import Weight

    Cut = Callable[[Weight], torch.Tensor]  # a whole tensor [outputs, inputs] or [outputs] -> one rank's part of it

ALL = slice(None)


class FusableLinearMethod(LinearMethod):
    """A linear method for every milestone: any but `Plain` is one. All methods have a default that any weights can have."""

    ignores: ClassVar[tuple[str, ...]] = ()  # kinds of tensors that a checkpoint may hold and the product does not need

    def check_ignored(self, name: str, tensor: torch.Tensor) -> None:
        """Raise ValueError if a tensor of a kind in `ignores` says what the product would need after all."""

    def repack(self, kind: str, tensor: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """Return a tensor that was read (and sharded) in the order of its destination, a view of this `shape`."""
        return tensor

    def fill(self, kind: str, tensor: torch.Tensor, generator: torch.Generator) -> None:
        """Make up a whole tensor in the order of its destination, so that weights are about N(0, 0.02)."""
        tensor.normal_(0.0, 0.02, generator=generator)

    def num_bytes(self, outputs: int, inputs: int, dtype: torch.dtype) -> int:
        """What W takes of a card's memory; `dtype` is the model's."""
        return outputs * inputs * dtype.itemsize

    def check_part(self, outputs: int, inputs: int) -> None:
        """Raise ValueError unless a rank can have a part of [outputs, inputs]. The message completes a sentence about the layer."""

    def shard(self, kind: str, tensor: Weight, cut: Cut) -> torch.Tensor:
        """Return one rank's part of a checkpoint's tensor.

        `cut` reads `shape` and takes a slice of outputs, or of inputs. A tensor in another layout is wrapped first
        (`distributed.sharding.Weight`).
        """
        return cut(tensor)

    def shard_filled(self, kind: str, tensor: torch.Tensor, cut: Cut) -> torch.Tensor:
        """Return one rank's part of a tensor that `fill` made up, in the order of its destination."""
        return self.shard(kind, tensor, cut)

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
        self, layer: LinearBase, x: torch.Tensor, group: ProcessGroup, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Multiply a rank's inputs, and add up over ranks: [T, outputs] on all of them. `residual`, as of `apply`, is added once."""
        total = group.all_reduce(self.apply(layer, x))
        return total if residual is None else residual.add_(total)

    def can_fold(self, layer: LinearBase) -> bool:
        """Whether `fold` works, and the product of an `x` that is divided only afterwards is as exact."""
        return False

    def fold(self, layer: LinearBase, scale: torch.Tensor) -> None:
        """Multiply the columns of W by `scale` [inputs], for good: (x * scale) W^T is x (W * scale)^T."""
        raise NotImplementedError(f"{type(self).__name__} cannot fold")


class FusablePlain(Plain, FusableLinearMethod):
    """Plain weights, of which columns can be multiplied for good."""

    def can_fold(self, layer: LinearBase) -> bool:
        """False with a bias, which a late division would scale, and in float16.

        Before it is divided, a result may be larger than float16 can hold.
        """
        return layer.bias is None and layer.weight.dtype != torch.float16

    def fold(self, layer: LinearBase, scale: torch.Tensor) -> None:
        layer.weight.data *= scale


PLAIN = FusablePlain()


class RankSum(nn.Module):
    """Adds up what the ranks computed, for layers that are no linear layer. Here there is one rank; for several: `layers.sharded`."""

    rank, size = 0, 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's part of a sum [T, H] -> the sum."""
        return x


def fusable(linear_method: LinearMethod) -> FusableLinearMethod:
    """Return the same linear method; for M1's plain one, the one of all milestones."""
    return PLAIN if type(linear_method) is Plain else cast(FusableLinearMethod, linear_method)


def fused(
    layer: LinearBase,
    x: torch.Tensor,
    norm_eps: float | None = None,
    gated: bool = False,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply with a norm before it, or a gate or an addition after it (`FusableLinearMethod.apply`).

    The inputs of a layer with a `group` are one rank's, and the result is the sum over ranks. No rank has a whole row before it.
    """
    linear_method = fusable(layer.linear_method)
    if (group := getattr(layer, "group", None)) is None:
        return linear_method.apply(layer, x, norm_eps, gated, residual)
    assert norm_eps is None and not gated, "no rank has a whole row before the sum"
    return linear_method.summed(layer, x, group, residual)


def fuses(layer: LinearBase, x: torch.Tensor) -> bool:
    """Whether `fused` is one kernel for this batch."""
    return fusable(layer.linear_method).fuses(layer, x)
