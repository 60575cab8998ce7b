"""Weights in FP8 (E4M3): per tensor, per output, or in blocks of 128 x 128 as Qwen's and DeepSeek's checkpoints have them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from folovllm.quantization.scaled import Scaled

if TYPE_CHECKING:
    from folovllm.layers.linear import LinearBase

LARGEST = 448.0  # of E4M3


@dataclass(frozen=True)
class Fp8(Scaled):
    """Codes are E4M3, half the bytes of 16 bits; activations stay as they are, also where a checkpoint has scales for them."""

    codes = torch.float8_e4m3fn
    code_names = ("F8_E4M3",)
    spread = 64.0


@dataclass(frozen=True)
class Fp8Both(Fp8):
    """Activations are rounded to E4M3 too, with a scale for each token, or for each 128 inputs of it where weights have blocks.

    Then a GPU multiplies FP8 by FP8, which it does at twice the rate, and unpacks nothing. Whatever the batch, each product
    rounds its inputs in the same way, so that a token's answer does not depend on who else is there. That error is ten
    times that of bfloat16, so it must have been asked for.
    """

    def create(self, layer: LinearBase) -> None:
        """As `Scaled`. Raises ValueError where groups of activations would not be whole."""
        if layer.input_size % (self.group_of(layer) or 1):
            raise ValueError(
                f"quantize_activations needs inputs in whole groups of {self.group_of(layer)}, not {layer.input_size}: "
                "leave it out"
            )
        super().create(layer)

    def group_of(self, layer: LinearBase) -> int | None:
        """Inputs of a token that share a scale; None: all."""
        return None if self.block is None else min(self.block[1], layer.input_size)

    def fuses(self, layer: LinearBase, x: torch.Tensor) -> bool:
        """False: all products are one, for few tokens too."""
        return False

    def product(self, layer: LinearBase, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """As `WeightFormat`. Where the library has no such product, of rounded numbers in the dtype of `x`."""
        if self.has_kernels(layer, x):
            y = self.product_on_gpu(layer, x)
        else:
            y = F.linear(rounded(self.folded(layer, x), self.group_of(layer)), self.dequantized(layer, x.dtype))
        y = y if layer.bias is None else y.add_(layer.bias)
        return y if residual is None else residual.add_(y)

    def product_on_gpu(self, layer: LinearBase, x: torch.Tensor) -> torch.Tensor:
        """x W^T."""
        from folovllm.quantization.kernels.quant_matmul import unpacked
        from folovllm.quantization.kernels.quantize_rows import fp8_matmul, serves

        weight = self.weight_of(layer)
        if x.dtype == torch.bfloat16 and serves(weight):
            return fp8_matmul(x, weight, layer.columns)
        return F.linear(rounded(self.folded(layer, x), self.group_of(layer)), unpacked(weight, x.dtype))

    def check_stack(self, layer: LinearBase) -> None:
        """As `WeightFormat`: experts have a kernel of their own, which does not round."""
        raise ValueError("quantize_activations is for dense models: leave it out")


def rounded(x: torch.Tensor, group: int | None) -> torch.Tensor:
    """`x` [T, K] to the nearest codes of E4M3, in its own dtype; of a row, or of each `group`, the largest is a code."""
    parts = x.float().unflatten(1, (-1, group or x.shape[1]))
    largest = parts.abs().amax(-1, keepdim=True)
    scale = torch.where(largest > 0, largest / LARGEST, 1.0)
    return ((parts / scale).to(torch.float8_e4m3fn).float() * scale).flatten(1).to(x.dtype)
