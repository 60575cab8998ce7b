"""Weights of 8 bits times scales: FP8 (E4M3) and INT8.

A scale is for a tensor, for an output, or for a block: of 128 x 128 in Qwen's and DeepSeek's checkpoints in FP8.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import nn

from folovllm.electives.quantization.linear_method import QuantizedLinearMethod, StoredView, on_gpu, rows_of
from folovllm.electives.quantization.weight import QuantizedWeight, has_fp8
from folovllm.engine.require import is_whole
from folovllm.layers.fusable import ALL
from folovllm.layers.linear import FLOATS
from folovllm.step.kv_format import LARGEST

if TYPE_CHECKING:
    from folovllm.distributed.sharding import Weight
    from folovllm.layers.fusable import Cut
    from folovllm.layers.linear import LinearBase


ROWS = 4096  # outputs that are quantized at once
FROM_UNSIGNED = -0x7F7F7F80  # 0x80808080: flips the highest bit of four bytes, which subtracts 128 from each


@dataclass(frozen=True)
class Scaled(QuantizedLinearMethod):
    """W is `weight` [outputs, inputs], codes, times `scale`, float32: one for each output, or for each block of W.

    Activations stay as they are. A scale for the whole layer is kept once for each output.

    Attributes:
        scale_name: what the checkpoint calls the scale.
        block: how many outputs and inputs share a scale; None: all inputs of an output.
    """

    scale_name: str = "weight_scale"
    block: tuple[int, int] | None = None

    codes: ClassVar[torch.dtype]
    code_names: ClassVar[tuple[str, ...]]  # the dtype as safetensors call it
    spread: ClassVar[float]  # standard deviation of made-up codes
    # Activations stay as they are, and codes of which zero is zero need none to be named.
    ignores: ClassVar[tuple[str, ...]] = ("input_scale", "activation_scale", "weight_zero_point")

    def __post_init__(self) -> None:
        """Raise ValueError where a checkpoint's block is none."""
        if self.block is not None and not all(is_whole(size) and size > 0 for size in self.block):
            raise ValueError(
                f"a block of weights with a scale is {self.block}, and must be two whole numbers of at least 1"
            )

    def create(self, layer: LinearBase) -> None:
        """Make the codes, and the scales: [outputs, 1], or a row for each row of blocks. A part begins a new row."""
        super().create(layer)
        codes = torch.empty(sum(layer.output_sizes), layer.input_size, dtype=self.codes)
        layer.weight = nn.Parameter(codes, requires_grad=False)
        _, columns = self.block_of(layer.input_size)
        shape = (sum(self.scale_rows(layer)), -(-layer.input_size // columns))
        layer.scale = nn.Parameter(torch.empty(shape, dtype=torch.float32), requires_grad=False)

    def block_of(self, inputs: int) -> tuple[int, int]:
        """Return how many outputs and inputs share a scale."""
        return self.block or (1, inputs)

    def scale_rows(self, layer: LinearBase) -> list[int]:
        """Return the rows of scales of each of `output_sizes`."""
        rows, _ = self.block_of(layer.input_size)
        return [-(-size // rows) for size in layer.output_sizes]

    def weight_views(self, layer: LinearBase) -> dict[str, Sequence[torch.Tensor]]:
        """Return the rows of each part, of codes and of scales."""
        codes = torch.split(layer.weight.data, layer.output_sizes)
        return {"weight": codes, self.scale_name: torch.split(layer.scale.data, self.scale_rows(layer))}

    def stored(self, kind: str) -> tuple[str, ...]:
        """Codes have their own dtype, scales any float."""
        return self.code_names if kind == "weight" else FLOATS

    def repack(self, kind: str, tensor: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """A single scale, [] or [1], is that of all outputs; one for each output may come without its last dimension."""
        if kind != self.scale_name:
            return tensor
        if tensor.numel() == 1:
            return tensor.reshape(1, 1).expand(shape)
        return tensor[:, None] if len(tensor.shape) == 1 else tensor

    def fill(self, kind: str, tensor: torch.Tensor, generator: torch.Generator) -> None:
        """Make up codes with a standard deviation of `spread`, and scales that bring it to 0.02."""
        if kind == self.scale_name:
            tensor.fill_(0.02 / self.spread)
        elif kind == "weight":
            drawn = torch.empty(tensor.shape, device=tensor.device).normal_(0.0, self.spread, generator=generator)
            tensor.copy_(drawn.clamp_(-127, 127))
        else:
            super().fill(kind, tensor, generator)

    def num_bytes(self, outputs: int, inputs: int, dtype: torch.dtype) -> int:
        rows, columns = self.block_of(inputs)
        return outputs * inputs + 4 * -(-outputs // rows) * -(-inputs // columns)

    def check_part(self, outputs: int, inputs: int) -> None:
        rows, columns = self.block_of(inputs)
        if outputs % rows or inputs % columns:
            raise ValueError(
                f"a rank's part [{outputs}, {inputs}] would not hold whole blocks of {rows} x {columns} weights with a scale"
            )

    def shard(self, kind: str, tensor: Weight, cut: Cut) -> torch.Tensor:
        """Cut codes and scales. A single scale is kept by all ranks."""
        if kind != self.scale_name:
            return cut(tensor)
        if tensor.shape.numel() == 1:
            return tensor[:] if tensor.shape else tensor[...]
        return cut(StoredView(tensor, self.block or (1, 1)))

    def product(self, layer: LinearBase, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        x = self.folded(layer, x)
        if not self.has_kernels(layer, x):
            y = F.linear(x, self.dequantized(layer, x.dtype), layer.bias)
            return y if residual is None else residual.add_(y)
        from folovllm.electives.quantization.kernels.quant_matmul import multiply

        y = multiply(x, self.weight_of(layer), residual)
        return y if layer.bias is None else y.add_(layer.bias)

    def fused(
        self, layer: LinearBase, x: torch.Tensor, norm_eps: float | None, gated: bool, residual: torch.Tensor | None
    ) -> torch.Tensor:
        from folovllm.electives.quantization.kernels.quant_gemv import quant_gemv

        return quant_gemv(x, self.weight_of(layer), norm_eps, gated, residual, layer.columns)

    def fuses(self, layer: LinearBase, x: torch.Tensor) -> bool:
        """Return True for few tokens and no bias, on a card whose tensor cores serve few tokens."""
        if layer.bias is not None or not self.has_kernels(layer, x):
            return False
        from folovllm.electives.quantization.kernels.quant_gemv import FEW, serves

        return len(x) in FEW and serves(x)

    def has_kernels(self, layer: LinearBase, x: torch.Tensor) -> bool:
        """Return whether a kernel multiplies: on a GPU, where it can read the scales."""
        return self.is_aligned(layer) and on_gpu(x)

    def is_aligned(self, layer: LinearBase) -> bool:
        """Return whether a kernel can read the scales: blocks are multiples of 16 inputs, and none crosses two parts of the layer."""
        rows, columns = self.block_of(layer.input_size)
        overlap = any(size % rows for size in layer.output_sizes[:-1])
        return layer.input_size % 16 == columns % 16 == 0 and not overlap

    def check_stack(self, layer: LinearBase) -> None:
        if not self.is_aligned(layer):
            rows, columns = self.block_of(layer.input_size)
            raise ValueError(
                f"blocks of {rows} x {columns} weights with a scale do not divide [{layer.output_sizes[0]}, "
                f"{layer.input_size}] into multiples of 16 inputs"
            )

    def weight_of(self, layer: LinearBase) -> QuantizedWeight:
        return QuantizedWeight(layer.weight, layer.scale, *self.block_of(layer.input_size))

    def dequantized(self, layer: LinearBase, dtype: torch.dtype, parts: slice = ALL) -> torch.Tensor:
        sizes, scale_rows, (rows, columns) = layer.output_sizes, self.scale_rows(layer), self.block_of(layer.input_size)
        weight, scales = layer.weight[rows_of(sizes, parts)].to(dtype), layer.scale[rows_of(scale_rows, parts)]
        if rows == 1 and layer.input_size % columns == 0:
            weight.unflatten(1, (-1, columns)).mul_(scales[:, :, None])
            return weight
        each = torch.split(weight, sizes[parts]), torch.split(scales, scale_rows[parts])
        for part, scale in zip(*each, strict=True):
            wide = scale.repeat_interleave(columns, 1)[:, : layer.input_size]  # [rows of blocks, inputs]
            for block, factors in zip(part.split(rows), wide, strict=True):
                block *= factors
        return weight


@dataclass(frozen=True)
class Fp8(Scaled):
    """Codes are E4M3, half the bytes of 16 bits; activations stay as they are.

    Attributes:
        online: the checkpoint has floats. A layer keeps them, in its own dtype, until all are loaded; then each output gets codes
            and a scale.
    """

    online: bool = False

    codes = torch.float8_e4m3fn
    code_names = ("F8_E4M3",)
    spread = 64.0

    def create(self, layer: LinearBase) -> None:
        super().create(layer)
        layer.floats = None  # type: ignore[assignment]  # only while weights are loaded

    def weight_views(self, layer: LinearBase) -> dict[str, Sequence[torch.Tensor]]:
        if not self.online:
            return super().weight_views(layer)
        if getattr(layer, "floats", None) is None:
            layer.floats = torch.empty_like(layer.weight, dtype=layer.dtype)
        return {"weight": torch.split(cast(torch.Tensor, layer.floats), layer.output_sizes)}

    def stored(self, kind: str) -> tuple[str, ...]:
        return FLOATS if self.online else super().stored(kind)

    def fill(self, kind: str, tensor: torch.Tensor, generator: torch.Generator) -> None:
        if self.online:
            tensor.normal_(0.0, 0.02, generator=generator)
        else:
            super().fill(kind, tensor, generator)

    def loaded(self, layer: LinearBase) -> None:
        """Quantize what was loaded: the largest weight of an output becomes the largest code."""
        super().loaded(layer)
        if layer.floats is not None:
            floats, layer.floats = cast(torch.Tensor, layer.floats), None  # type: ignore[assignment]
            for codes, scales, rows in zip(
                layer.weight.split(ROWS), layer.scale.split(ROWS), floats.split(ROWS), strict=True
            ):
                largest = rows.float().abs().amax(1, keepdim=True)
                scales.copy_(torch.where(largest > 0, largest / LARGEST, 1.0))
                codes.copy_(rows.float() / scales)


class Rounded(NamedTuple):
    """Rows of activations in FP8: codes [R, K] and scales as `quantize_rows` gives them, for the first `num_tokens` rows."""

    codes: torch.Tensor
    scales: torch.Tensor
    num_tokens: int
    dtype: torch.dtype


@dataclass(frozen=True)
class Fp8Both(Fp8):
    """Activations are rounded to E4M3 too, where the card multiplies FP8 by FP8: a GPU from compute capability 8.9 on.

    A scale is for a token, or for each group of its inputs where weights have blocks; or the checkpoint's own. Whatever the batch,
    each product rounds its inputs in the same way, so that a token's answer does not depend on who else is there. Elsewhere, and
    for experts, activations stay as they are.

    Attributes:
        is_static: the checkpoint has a scale for the inputs of each layer.
        hands_on: a gated product is rounded for the product that follows, which reads nothing else.
    """

    is_static: bool = False
    hands_on: bool = False

    def create(self, layer: LinearBase) -> None:
        super().create(layer)
        layer.input_scale = None  # type: ignore[assignment]
        if self.is_static:
            layer.input_scale = torch.empty(len(layer.output_sizes), dtype=torch.float32)

    def weight_views(self, layer: LinearBase) -> dict[str, Sequence[torch.Tensor]]:
        scales = {"input_scale": cast(torch.Tensor, layer.input_scale).split(1)} if self.is_static else {}
        return super().weight_views(layer) | scales

    def stored(self, kind: str) -> tuple[str, ...]:
        return FLOATS if kind == "input_scale" else super().stored(kind)

    def repack(self, kind: str, tensor: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        is_one = kind == "input_scale" and tensor.numel() == 1
        return tensor.reshape(1) if is_one else super().repack(kind, tensor, shape)

    def shard(self, kind: str, tensor: Weight, cut: Cut) -> torch.Tensor:
        return tensor[...] if kind == "input_scale" else super().shard(kind, tensor, cut)

    def fill(self, kind: str, tensor: torch.Tensor, generator: torch.Generator) -> None:
        if kind == "input_scale":
            tensor.fill_(4 / LARGEST)
        else:
            super().fill(kind, tensor, generator)

    def loaded(self, layer: LinearBase) -> None:
        """Layers that were merged read one input, so it gets the largest of their scales."""
        super().loaded(layer)
        if self.is_static:
            scales = cast(torch.Tensor, layer.input_scale)
            scales.fill_(scales.amax())

    def group_of(self, inputs: int) -> int | None:
        """Return how many inputs of a token share a scale; None: all."""
        return None if self.block is None or self.block[1] >= inputs else self.block[1]

    def rounds(self, layer: LinearBase, inputs: int) -> bool:
        """Return whether products with so many inputs are FP8 times FP8: where the card and the kernel have them."""
        group = self.group_of(inputs) or 32
        fits = inputs % 16 == inputs % group == group % 32 == 0 and layer.dtype.itemsize == 2
        return fits and layer.weight.is_cuda and has_fp8(layer.weight.device) and self.is_aligned(layer)

    def apply(
        self,
        layer: LinearBase,
        x: torch.Tensor | Rounded,
        norm_eps: float | None = None,
        gated: bool = False,
        residual: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As for all linear methods. Inputs that the product before has rounded are multiplied as they are."""
        if isinstance(x, Rounded):
            return self.multiply(layer, x, residual)
        return super().apply(layer, x, norm_eps, gated, residual)

    def fuses(self, layer: LinearBase, x: torch.Tensor) -> bool:
        """Return True where FP8 is multiplied by FP8: the kernel that rounds also norms."""
        return layer.bias is None and (self.rounds(layer, layer.input_size) or super().fuses(layer, x))

    def fused(
        self, layer: LinearBase, x: torch.Tensor, norm_eps: float | None, gated: bool, residual: torch.Tensor | None
    ) -> torch.Tensor:
        if not self.rounds(layer, layer.input_size):
            return super().fused(layer, x, norm_eps, gated, residual)
        from folovllm.electives.quantization.kernels.quant_gemv import can_round, quant_gemv

        if not self.is_static and can_round(x, self.group_of(layer.input_size)):
            return quant_gemv(x, self.weight_of(layer), norm_eps, gated, residual, layer.columns, rounds=True)
        y = self.multiply(layer, self.round(layer, x, norm_eps), residual)
        return y if not gated else self.activate(layer, y)

    def activate(self, layer: LinearBase, gate_up: torch.Tensor) -> torch.Tensor:
        """Return silu(gate) * up, rounded if the next product wants that."""
        from folovllm.electives.quantization.kernels.quantize_rows import quantize_rows
        from folovllm.kernels.activation import silu_and_mul

        inputs = gate_up.shape[1] // 2
        if not (self.hands_on and self.rounds(layer, inputs)):
            return silu_and_mul(gate_up)
        codes = quantize_rows(gate_up, self.group_of(inputs), gated=True)
        return cast(torch.Tensor, Rounded(*codes, len(gate_up), gate_up.dtype))

    def round(self, layer: LinearBase, x: torch.Tensor, norm_eps: float | None = None) -> Rounded:
        """Return `x` in FP8; with `norm_eps` it is normed first."""
        from folovllm.electives.quantization.kernels.quantize_rows import quantize_rows

        columns, scale = (cast(torch.Tensor | None, tensor) for tensor in (layer.columns, layer.input_scale))
        codes = quantize_rows(x, self.group_of(layer.input_size), columns, norm_eps, scale)
        return Rounded(*codes, len(x), x.dtype)

    def multiply(self, layer: LinearBase, x: Rounded, residual: torch.Tensor | None) -> torch.Tensor:
        """Return x W^T, plus the residual."""
        from folovllm.electives.quantization.kernels.fp8_linear import fp8_product

        return fp8_product(x.codes, x.scales, self.weight_of(layer), x.num_tokens, x.dtype, residual)

    def product(self, layer: LinearBase, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        if not self.rounds(layer, layer.input_size):
            return super().product(layer, x, residual)
        y = self.multiply(layer, self.round(layer, x), residual)
        return y if layer.bias is None else y.add_(layer.bias)


@dataclass(frozen=True)
class Int8(Scaled):
    """Codes are int8. Activations stay as they are."""

    codes = torch.int8
    code_names = ("I8",)
    spread = 32.0


@dataclass(frozen=True)
class PackedInt8(Int8):
    """The checkpoint has four codes in an int32, the first in its lowest byte, and 128 more than they are."""

    ignores = (*Int8.ignores, "weight_shape")

    def weight_views(self, layer: LinearBase) -> dict[str, Sequence[torch.Tensor]]:
        """Codes are seen in fours."""
        if layer.input_size % 4:
            raise ValueError(f"packed weights of 8 bits need a multiple of 4 inputs, not {layer.input_size}")
        places = super().weight_views(layer)
        return {"weight_packed": [part.view(torch.int32) for part in places.pop("weight")], **places}

    def stored(self, kind: str) -> tuple[str, ...]:
        return ("I32",) if kind == "weight_packed" else super().stored(kind)

    def fill(self, kind: str, tensor: torch.Tensor, generator: torch.Generator) -> None:
        packed = kind == "weight_packed"
        super().fill("weight" if packed else kind, tensor.view(torch.int8) if packed else tensor, generator)

    def repack(self, kind: str, tensor: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """Codes get their sign."""
        return tensor ^ FROM_UNSIGNED if kind == "weight_packed" else super().repack(kind, tensor, shape)


def rounded(x: torch.Tensor, group: int | None) -> torch.Tensor:
    """Return `x` [T, K] rounded to codes of E4M3, in its own dtype; the largest of a row, or of each `group`, is exact."""
    parts = x.float().unflatten(1, (-1, group or x.shape[1]))
    largest = parts.abs().amax(-1, keepdim=True)
    scale, factor = (torch.where(largest > 0, y, 1.0) for y in (largest / LARGEST, LARGEST / largest))
    return ((parts * factor).to(torch.float8_e4m3fn).float() * scale).flatten(1).to(x.dtype)
