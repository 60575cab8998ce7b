"""The base class of all linear methods of quantized weights: which kernel multiplies, and what was folded into the weights."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F

from folovllm.engine.require import is_whole
from folovllm.layers.fusable import ALL, FusableLinearMethod
from folovllm.layers.linear import FLOATS

if TYPE_CHECKING:
    from folovllm.electives.quantization.weight import QuantizedWeight
    from folovllm.layers.linear import LinearBase


Dtypes = Mapping[str, tuple[str, ...]]  # by the kind of a tensor, as safetensors call them


class QuantizedLinearMethod(FusableLinearMethod):
    """Quantized weights, which kernels read as a `QuantizedWeight`.

    Factors of the inputs cannot be folded into quantized weights. They are kept: `layer.columns` [inputs], or None.
    """

    dtypes: ClassVar[
        Mapping[str, tuple[str, ...]]
    ] = {}  # of kinds of tensors that are no floats, as safetensors call them

    def stored(self, kind: str) -> tuple[str, ...]:
        return self.dtypes.get(kind, FLOATS)

    def create(self, layer: LinearBase) -> None:
        layer.columns, layer.dtype = None, torch.get_default_dtype()  # of activations

    def loaded(self, layer: LinearBase) -> None:
        """Forget what was folded into earlier weights."""
        layer.columns = None

    def can_fold(self, layer: LinearBase) -> bool:
        """Return False with a bias, and in float16, as unquantized weights do."""
        return layer.bias is None and layer.dtype != torch.float16

    def fold(self, layer: LinearBase, scale: torch.Tensor) -> None:
        """Keep the factors; every product multiplies its `x` by them."""
        layer.columns = scale.clone() if layer.columns is None else layer.columns * scale

    def prepared(self, layer: LinearBase, x: torch.Tensor) -> torch.Tensor:
        """Return `x` as the weights take it: times what was folded into them."""
        return x if layer.columns is None else x * layer.columns

    @abstractmethod
    def weight_of(self, layer: LinearBase) -> QuantizedWeight:
        """Return the weight as kernels read it. Works after `check_stack`."""

    @abstractmethod
    def dequantized(self, layer: LinearBase, dtype: torch.dtype, parts: slice = ALL) -> torch.Tensor:
        """Return W [outputs, inputs] of some of the `output_sizes` in `dtype`, a copy. Works after `check_stack`."""

    @abstractmethod
    def check_stack(self, layer: LinearBase) -> None:
        """Raise ValueError unless the parts of `layer` can be used one by one, as experts are. The message completes a sentence."""

    def has_kernels(self, layer: LinearBase, x: torch.Tensor) -> bool:
        """Return whether a kernel multiplies."""
        return on_gpu(x)

    def product(self, layer: LinearBase, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        x = self.prepared(layer, x)
        if not self.has_kernels(layer, x):
            y = self.product_without_kernels(layer, x)
            return y if residual is None else residual.add_(y)
        from folovllm.electives.quantization.kernels.quant_matmul import multiply

        y = multiply(x, self.weight_of(layer), residual)
        return y if layer.bias is None else y.add_(layer.bias)

    def product_without_kernels(self, layer: LinearBase, x: torch.Tensor) -> torch.Tensor:
        """Return x W^T + b by torch alone."""
        return F.linear(x, self.dequantized(layer, x.dtype), layer.bias)

    def fuses(self, layer: LinearBase, x: torch.Tensor) -> bool:
        """Return True for few tokens and no bias, where kernels multiply."""
        if layer.bias is not None or not self.has_kernels(layer, x):
            return False
        from folovllm.electives.quantization.kernels.quant_gemv import FEW

        return len(x) in FEW

    def fused(
        self, layer: LinearBase, x: torch.Tensor, norm_eps: float | None, gated: bool, residual: torch.Tensor | None
    ) -> torch.Tensor:
        from folovllm.electives.quantization.kernels.quant_gemv import quant_gemv

        return quant_gemv(x, self.weight_of(layer), norm_eps, gated, residual, layer.columns)

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
        """Multiply each token by the matrices of its experts, which are the parts of `layer` (`moe.experts`)."""
        from folovllm.electives.quantization.kernels.grouped_quant import grouped_quant

        return grouped_quant(x, self.weight_of(layer), num_experts, order, starts, gated, out)


class StoredView:
    """A checkpoint's matrix seen as [outputs, inputs], whose numbers stand for `units` of outputs and of inputs each.

    An index is in outputs and inputs, and begins and ends between units. If all inputs share a number, every rank has it.
    """

    def __init__(self, stored: torch.Tensor, units: tuple[int, int]) -> None:
        self.stored, self.units = stored, units
        self.shape = torch.Size(size * unit for size, unit in zip(stored.shape, units, strict=True))

    def __getitem__(self, index: Any) -> torch.Tensor:
        rows, columns = index if isinstance(index, tuple) else (index, slice(None))
        is_shared = self.stored.shape[1] == 1
        return self.stored[shrunk(rows, self.units[0]), slice(None) if is_shared else shrunk(columns, self.units[1])]


def shrunk(span: slice, size: int) -> slice:
    """Return a slice in units of `size`. Raises ValueError if it begins or ends within one."""
    if any(end is not None and end % size for end in (span.start, span.stop)):
        raise ValueError(f"a part begins or ends within {size} numbers that belong together")
    return slice(*(None if end is None else end // size for end in (span.start, span.stop)))


def rows_of(sizes: Sequence[int], parts: slice) -> slice:
    """Return the rows of some parts; `sizes` has the rows of each part."""
    first, end, _ = parts.indices(len(sizes))
    return slice(sum(sizes[:first]), sum(sizes[:end]))


def require_sizes(what: str, *sizes: object) -> None:
    """Raise ValueError unless all sizes that a checkpoint's configuration names are whole numbers of at least 1."""
    if not all(is_whole(size) and size > 0 for size in sizes):  # type: ignore[operator]
        raise ValueError(f"{what} is {', '.join(map(repr, sizes))}, where whole numbers of at least 1 are needed")


def on_gpu(x: torch.Tensor) -> bool:
    """Return whether kernels should multiply these. In the interpreter their many programs would take minutes."""
    return x.is_cuda
