"""FP8 (E4M3): weights alone, or FP8 times FP8; from checkpoints in FP8, or from floats while these are loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple, cast

import torch

from folovllm.electives.quantization.linear_method import Dtypes
from folovllm.electives.quantization.scaled import Scaled
from folovllm.electives.quantization.weight import has_fp8
from folovllm.layers.linear import FLOATS
from folovllm.step.kv_format import LARGEST

if TYPE_CHECKING:
    from folovllm.distributed.sharding import Weight
    from folovllm.layers.fusable import Cut
    from folovllm.layers.linear import LinearBase

ROWS = 4096  # outputs that are quantized at once


class QuantizedRows(NamedTuple):
    """Activations in FP8: codes [R, K] and scales as `quantize_rows` returns them, of which the first `num_tokens` rows count."""

    codes: torch.Tensor
    scales: torch.Tensor
    num_tokens: int
    dtype: torch.dtype  # of the activations


@dataclass(frozen=True)
class Fp8(Scaled):
    """Codes are E4M3, half the bytes of 16 bits.

    Activations are rounded to E4M3 too if `activations` is given and the card multiplies FP8 by FP8: a GPU from compute capability
    8.9 on. Whatever the batch, each product rounds its inputs in the same way, so a token's answer does not depend on the other
    requests. Elsewhere, and for experts, activations stay as they are.

    Attributes:
        online: the checkpoint has floats. A layer keeps them, in its own dtype, until all are loaded; then each output gets codes
            and a scale.
        activations: where the scales of activations come from. "dynamic": from each token, or each group of its inputs where
            weights have blocks; "static": from the checkpoint, one for each layer. None: activations stay as they are.
        rounds_gated: the result of a gated product is rounded for the product that follows, which alone reads it.
    """

    online: bool = False
    activations: str | None = None
    rounds_gated: bool = False

    codes = torch.float8_e4m3fn
    dtypes: ClassVar[Dtypes] = {"weight": ("F8_E4M3",)}
    random_std = 64.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.activations not in ("dynamic", "static", None):
            raise ValueError(f"activation_scheme {self.activations!r} is not supported: 'dynamic' and 'static' are")

    @property
    def is_static(self) -> bool:
        """Return whether the checkpoint has a scale for the inputs of each layer."""
        return self.activations == "static"

    def create(self, layer: LinearBase) -> None:
        super().create(layer)
        layer.floats = layer.input_scale = None  # type: ignore[assignment]  # floats: only while weights are loaded
        if self.is_static:
            layer.input_scale = torch.empty(len(layer.output_sizes), dtype=torch.float32)

    def weight_views(self, layer: LinearBase) -> dict[str, Sequence[torch.Tensor]]:
        scales = {"input_scale": cast(torch.Tensor, layer.input_scale).split(1)} if self.is_static else {}
        if not self.online:
            return super().weight_views(layer) | scales
        if getattr(layer, "floats", None) is None:
            layer.floats = torch.empty_like(layer.weight, dtype=layer.dtype)
        return {"weight": torch.split(cast(torch.Tensor, layer.floats), layer.output_sizes)}

    def stored(self, kind: str) -> tuple[str, ...]:
        return FLOATS if self.online else super().stored(kind)

    def repack(self, kind: str, tensor: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        is_one = kind == "input_scale" and tensor.numel() == 1
        return tensor.reshape(1) if is_one else super().repack(kind, tensor, shape)

    def shard(self, kind: str, tensor: Weight, cut: Cut) -> torch.Tensor:
        return tensor[...] if kind == "input_scale" else super().shard(kind, tensor, cut)

    def fill(self, kind: str, tensor: torch.Tensor, generator: torch.Generator) -> None:
        if kind == "input_scale":
            tensor.fill_(4 / LARGEST)
        elif self.online:
            tensor.normal_(0.0, 0.02, generator=generator)
        else:
            super().fill(kind, tensor, generator)

    def loaded(self, layer: LinearBase) -> None:
        """Quantize loaded floats: the largest weight of an output becomes the largest code.

        Layers that were merged read one input, so it gets the largest of their scales.
        """
        super().loaded(layer)
        if self.is_static:
            scales = cast(torch.Tensor, layer.input_scale)
            scales.fill_(scales.amax())
        if layer.floats is not None:
            floats, layer.floats = cast(torch.Tensor, layer.floats), None  # type: ignore[assignment]
            for codes, scales, rows in zip(
                layer.weight.split(ROWS), layer.scale.split(ROWS), floats.split(ROWS), strict=True
            ):
                largest = rows.float().abs().amax(1, keepdim=True)
                scales.copy_(torch.where(largest > 0, largest / LARGEST, 1.0))
                codes.copy_(rows.float() / scales)

    def group_of(self, inputs: int) -> int | None:
        """Return how many inputs of a token share a scale; None: all."""
        return None if self.block is None or self.block[1] >= inputs else self.block[1]

    def multiplies_fp8(self, layer: LinearBase, inputs: int) -> bool:
        """Return whether products with so many inputs are FP8 times FP8: where the card and the kernel can do it."""
        if self.activations is None or layer.dtype.itemsize != 2 or not layer.weight.is_cuda:
            return False
        group = self.group_of(inputs)
        fits = inputs % 16 == 0 and (group is None or inputs % group == group % 32 == 0)
        return fits and has_fp8(layer.weight.device) and self.is_aligned(layer)

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

        if not self.is_static and can_round(x, self.group_of(layer.input_size)):
            return quant_gemv(x, self.weight_of(layer), norm_eps, gated, residual, layer.columns, rounds=True)
        y = self.multiply(layer, self.round(layer, x, norm_eps), residual)
        return self.activate(layer, y) if gated else y

    def activate(self, layer: LinearBase, gate_up: torch.Tensor) -> torch.Tensor:
        """Return silu(gate) * up, rounded if the next product wants that."""
        from folovllm.electives.quantization.kernels.quantize_rows import quantize_rows
        from folovllm.kernels.activation import silu_and_mul

        inputs = gate_up.shape[1] // 2
        if not (self.rounds_gated and self.multiplies_fp8(layer, inputs)):
            return silu_and_mul(gate_up)
        rows = quantize_rows(gate_up, self.group_of(inputs), gated=True)
        return cast(torch.Tensor, QuantizedRows(*rows, len(gate_up), gate_up.dtype))

    def round(self, layer: LinearBase, x: torch.Tensor, norm_eps: float | None = None) -> QuantizedRows:
        """Return `x` in FP8; with `norm_eps` it is normed first."""
        from folovllm.electives.quantization.kernels.quantize_rows import quantize_rows

        columns, scale = (cast(torch.Tensor | None, tensor) for tensor in (layer.columns, layer.input_scale))
        rows = quantize_rows(x, self.group_of(layer.input_size), columns, norm_eps, scale)
        return QuantizedRows(*rows, len(x), x.dtype)

    def multiply(self, layer: LinearBase, x: QuantizedRows, residual: torch.Tensor | None) -> torch.Tensor:
        """Return x W^T, plus the residual."""
        from folovllm.electives.quantization.kernels.fp8_linear import fp8_product

        return fp8_product(x.codes, x.scales, self.weight_of(layer), x.num_tokens, x.dtype, residual)

    def product(self, layer: LinearBase, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        if not self.multiplies_fp8(layer, layer.input_size):
            return super().product(layer, x, residual)
        y = self.multiply(layer, self.round(layer, x), residual)
        return y if layer.bias is None else y.add_(layer.bias)
