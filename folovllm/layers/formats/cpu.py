"""Plain weights on a CPU, with a kernel of our own where rows are few: it reads as fast as the memory gives."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from folovllm.kernels.cpu.ops import CpuKernels
from folovllm.layers.formats.plain import Plain

if TYPE_CHECKING:
    from folovllm.layers.linear import LinearBase


class CpuPlain(Plain):
    """With few rows the kernel adds bias and residual, too."""

    def __init__(self, kernels: CpuKernels) -> None:
        self._kernels = kernels

    def product(self, layer: LinearBase, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """As `WeightFormat`."""
        if self._kernels.multiplies(x, layer.weight):
            return self._kernels.linear(x, layer.weight, layer.bias, residual)
        return super().product(layer, x, residual)
