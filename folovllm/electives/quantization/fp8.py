"""FP8 (E4M3): weights alone, or FP8 times FP8; from checkpoints in FP8, or from floats while these are loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, cast

import torch

from folovllm.electives.quantization.layouts import E4M3, FP8, Layout
from folovllm.electives.quantization.linear_method import Quantized, state_of
from folovllm.electives.quantization.weight import has_fp8, round_channels
from folovllm.layers.linear import FLOATS

if TYPE_CHECKING:
    from folovllm.layers.linear import LinearBase

ROWS = 4096  # outputs that are quantized at once


class QuantizedRows(NamedTuple):
    """Activations in FP8: codes [R, K] and scales as `quantize_rows` returns them, of which the first `num_tokens` rows count."""

    codes: torch.Tensor
    scales: torch.Tensor
    num_tokens: int
    dtype: torch.dtype  # of the activations


@dataclass(frozen=True)
class Fp8(Quantized):
    """Codes are E4M3, half the bytes of 16 bits.

    Activations are rounded to E4M3 too if `rounds` is set and the card multiplies FP8 by FP8: a GPU from compute capability 8.9
    on. Whatever the batch, each product rounds its inputs in the same way, so a token's answer does not depend on the other
    requests. Elsewhere, and for experts, activations stay as they are.

    Attributes:
        online: the checkpoint has floats. A layer keeps them, in its own dtype, until all are loaded; then each output gets codes
            and a scale.
        rounds: round activations, too: with the layout's scale of `inputs`, else with one for each token, or each group of its
            inputs where weights have blocks.
        rounds_gated: the result of a gated product is rounded for the product that follows, which alone reads it.
    """

    layout: Layout = FP8
    online: bool = False
    rounds: bool = False
    rounds_gated: bool = False

    def weight_views(self, layer: LinearBase) -> dict[str, Sequence[torch.Tensor]]:
        """As `Quantized`; if `online`, each part's rows of a buffer of floats, which `loaded` quantizes and drops."""
        if not self.online:
            return super().weight_views(layer)
        state = state_of(layer)
        if state.floats is None:
            state.floats = torch.empty_like(self.weight_of(layer).weight, dtype=state.dtype)
        return {"weight": torch.split(state.floats, layer.output_sizes)}

    def stored(self, kind: str) -> tuple[str, ...]:
        return FLOATS if self.online else super().stored(kind)

    def fill(self, kind: str, tensor: torch.Tensor, generator: torch.Generator) -> None:
        if self.online:
            tensor.normal_(0.0, 0.02, generator=generator)
        else:
            super().fill(kind, tensor, generator)

    def loaded(self, layer: LinearBase) -> None:
        """Quantize loaded floats: the largest weight of an output becomes the largest code.

        Layers that were merged read one input, so it gets the largest of their scales.
        """
        super().loaded(layer)
        state, weight = state_of(layer), self.weight_of(layer)
        if state.input_scale is not None:
            state.input_scale.fill_(state.input_scale.amax())
        if state.floats is not None:
            floats, state.floats = state.floats, None
            for first in range(0, len(floats), ROWS):
                rows = slice(first, first + ROWS)
                weight.weight[rows], weight.scale[rows] = round_channels(floats[rows], E4M3, torch.float32)

    def group_of(self, inputs: int) -> int | None:
        """Return how many inputs of a token share a scale; None: all."""
        return None if self.block is None or self.block[1] >= inputs else self.block[1]

    def multiplies_fp8(self, layer: LinearBase, inputs: int) -> bool:
        """Return whether products with so many inputs are FP8 times FP8: where the card and the kernel can do it."""
        state = state_of(layer)
        if not self.rounds or state.dtype.itemsize != 2 or not layer.weight.is_cuda:
            return False
        group = self.group_of(inputs)
        fits = inputs % 16 == 0 and (group is None or inputs % group == group % 32 == 0)
        return fits and has_fp8(layer.weight.device) and state.is_aligned

    def product(self, layer: LinearBase, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        if not self.multiplies_fp8(layer, layer.input_size):
            return super().product(layer, x, residual)
        y = self.multiply(layer, self.round(layer, x), residual)
        return y if layer.bias is None else y.add_(layer.bias)

    def fuses(self, layer: LinearBase, x: torch.Tensor) -> bool:
        """Return True where FP8 is multiplied by FP8, too: the kernel that rounds also norms."""
        return layer.bias is None and (self.multiplies_fp8(layer, layer.input_size) or super().fuses(layer, x))

    def fused(
        self, layer: LinearBase, x: torch.Tensor | QuantizedRows, norm_eps: float | None, gated: bool, residual: torch.Tensor | None
    ) -> torch.Tensor:  # fmt: skip
        """As for all linear methods. Inputs that the product before has rounded are multiplied as they are."""
        if isinstance(x, QuantizedRows):
            return self.multiply(layer, x, residual)
        if not self.multiplies_fp8(layer, layer.input_size):
            return super().fused(layer, x, norm_eps, gated, residual)
        from folovllm.electives.quantization.kernels.quant_gemv import can_round, quant_gemv

        state = state_of(layer)
        if state.input_scale is None and can_round(x, self.group_of(layer.input_size)):
            return quant_gemv(x, self.weight_of(layer), norm_eps, gated, residual, state.columns, rounds=True)
        y = self.multiply(layer, self.round(layer, x, norm_eps), residual)
        if not gated:
            return y
        from folovllm.electives.quantization.kernels.quantize_rows import quantize_rows
        from folovllm.kernels.activation import silu_and_mul

        inputs = y.shape[1] // 2  # of the next product
        if not (self.rounds_gated and self.multiplies_fp8(layer, inputs)):
            return silu_and_mul(y)
        rows = quantize_rows(y, self.group_of(inputs), gated=True)
        return cast(torch.Tensor, QuantizedRows(*rows, len(y), y.dtype))

    def round(self, layer: LinearBase, x: torch.Tensor, norm_eps: float | None = None) -> QuantizedRows:
        """Return `x` in FP8; with `norm_eps` it is normed first."""
        from folovllm.electives.quantization.kernels.quantize_rows import quantize_rows

        state = state_of(layer)
        rows = quantize_rows(x, self.group_of(layer.input_size), state.columns, norm_eps, state.input_scale)
        return QuantizedRows(*rows, len(x), x.dtype)

    def multiply(self, layer: LinearBase, x: QuantizedRows, residual: torch.Tensor | None) -> torch.Tensor:
        """Return x W^T, plus the residual."""
        from folovllm.electives.quantization.kernels.fp8_linear import fp8_product

        return fp8_product(x.codes, x.scales, self.weight_of(layer), x.num_tokens, x.dtype, residual)
