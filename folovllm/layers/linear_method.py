"""The contract between a linear layer and whatever keeps its weight and multiplies by it (strategy pattern)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ClassVar

import torch
import torch.nn.functional as F

from folovllm.layers.activation import SiluAndMul

if TYPE_CHECKING:
    from folovllm.distributed.group import Group
    from folovllm.distributed.sharding import Weight
    from folovllm.layers.linear import LinearBase

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
        """Bring the weights into another form, now that all are there. `places` is asked for no more afterwards."""

    def check_part(self, outputs: int, inputs: int) -> None:
        """Raise ValueError unless ranks can have parts of [outputs, inputs] each: the end of a sentence about the layer."""

    def shard(self, kind: str, tensor: Weight, cut: Cut) -> torch.Tensor:
        """Return one rank's part of a checkpoint's tensor.

        `cut` reads `shape` and takes a slice of outputs, or of inputs. A tensor that lies otherwise is given to it in a
        wrapper (`distributed.sharding.Weight`) that does.
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
        """Whether `apply` does all that it is asked for `x` in one kernel (`fused`). If not, a caller may know a better way."""
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
        """Raise ValueError unless the parts of `layer` may be experts, each of which is multiplied by itself: the end of a
        sentence about them.
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
