"""The base class of all linear methods of quantized weights: factors of the inputs, and the product of experts."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from folovllm.layers.linear import LinearMethod

if TYPE_CHECKING:
    from folovllm.layers.linear import LinearBase
    from folovllm.quantization.weight import QuantizedWeight


class QuantizedLinearMethod(LinearMethod):
    """Quantized weights. What is folded into them cannot change the codes, so it is kept: `layer.columns`, factors of `x` [inputs] or None."""

    def create(self, layer: LinearBase) -> None:
        layer.columns, layer.dtype = None, torch.get_default_dtype()  # of activations

    def loaded(self, layer: LinearBase) -> None:
        """Forget what was folded into earlier weights."""
        layer.columns = None

    def can_fold(self, layer: LinearBase) -> bool:
        """Return False with a bias, and in float16, as plain weights do."""
        return layer.bias is None and layer.dtype != torch.float16

    def fold(self, layer: LinearBase, scale: torch.Tensor) -> None:
        """Keep the factors; every product multiplies its `x` by them."""
        layer.columns = scale.clone() if layer.columns is None else layer.columns * scale

    @abstractmethod
    def weight_of(self, layer: LinearBase) -> QuantizedWeight:
        """Return the weight as kernels read it. Works after `check_stack`."""

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
        from folovllm.quantization.kernels.grouped_quant import grouped_quant

        return grouped_quant(x, self.weight_of(layer), num_experts, order, starts, gated, out)

    def folded(self, layer: LinearBase, x: torch.Tensor) -> torch.Tensor:
        """Return `x` times what was folded into the weights."""
        return x if layer.columns is None else x * layer.columns


def rows_of(sizes: Sequence[int], parts: slice) -> slice:
    """Return the rows of some parts; `sizes` has the rows of each part."""
    first, end, _ = parts.indices(len(sizes))
    return slice(sum(sizes[:first]), sum(sizes[:end]))


def on_gpu(x: torch.Tensor) -> bool:
    """Return whether kernels should multiply these. In the interpreter their many programs would take minutes."""
    return x.is_cuda
