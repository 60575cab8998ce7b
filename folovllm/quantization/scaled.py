"""Weights as codes of 8 bits times scales: what FP8 and INT8 share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from folovllm.layers.linear_method import ALL, FLOATS
from folovllm.quantization.linear_method import QuantizedWeights, on_gpu, rows_of
from folovllm.quantization.weight import QuantizedWeight
from folovllm.require import is_whole

if TYPE_CHECKING:
    from folovllm.distributed.sharding import Weight
    from folovllm.layers.linear import LinearBase
    from folovllm.layers.linear_method import Cut


@dataclass(frozen=True)
class Scaled(QuantizedWeights):
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
        """How many outputs and inputs share a scale."""
        return self.block or (1, inputs)

    def scale_rows(self, layer: LinearBase) -> list[int]:
        """Rows of scales that each of `output_sizes` has."""
        rows, _ = self.block_of(layer.input_size)
        return [-(-size // rows) for size in layer.output_sizes]

    def places(self, layer: LinearBase) -> dict[str, Sequence[torch.Tensor]]:
        """The rows of each part, of codes and of scales."""
        codes = torch.split(layer.weight.data, layer.output_sizes)
        return {"weight": codes, self.scale_name: torch.split(layer.scale.data, self.scale_rows(layer))}

    def stored(self, kind: str) -> tuple[str, ...]:
        """Codes in their own dtype, scales in any float."""
        return self.code_names if kind == "weight" else FLOATS

    def arrange(self, kind: str, tensor: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """A single scale, [] or [1], is that of all outputs; one for each output may come without its last dimension."""
        if kind != self.scale_name:
            return tensor
        if tensor.numel() == 1:
            return tensor.reshape(1, 1).expand(shape)
        return tensor[:, None] if len(tensor.shape) == 1 else tensor

    def fill(self, kind: str, tensor: torch.Tensor, generator: torch.Generator) -> None:
        """As `WeightFormat`: codes with a spread of their own, and scales that bring it to 0.02."""
        if kind == self.scale_name:
            tensor.fill_(0.02 / self.spread)
        elif kind == "weight":
            drawn = torch.empty(tensor.shape, device=tensor.device).normal_(0.0, self.spread, generator=generator)
            tensor.copy_(drawn.clamp_(-127, 127))
        else:
            super().fill(kind, tensor, generator)

    def num_bytes(self, outputs: int, inputs: int, dtype: torch.dtype) -> int:
        """As `WeightFormat`: a byte for each, and four for each scale."""
        rows, columns = self.block_of(inputs)
        return outputs * inputs + 4 * -(-outputs // rows) * -(-inputs // columns)

    def check_part(self, outputs: int, inputs: int) -> None:
        """As `WeightFormat`: a border between ranks must be one between blocks."""
        rows, columns = self.block_of(inputs)
        if outputs % rows or inputs % columns:
            raise ValueError(
                f"a rank's part [{outputs}, {inputs}] would not hold whole blocks of {rows} x {columns} weights with a scale"
            )

    def shard(self, kind: str, tensor: Weight, cut: Cut) -> torch.Tensor:
        """As `WeightFormat`. A scale for everything is everybody's."""
        if kind != self.scale_name:
            return cut(tensor)
        if tensor.shape.numel() == 1:
            return tensor[:] if tensor.shape else tensor[...]
        return cut(PerOutput(tensor) if self.block is None else PerBlock(tensor, self.block))

    def product(self, layer: LinearBase, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """As `WeightFormat`: on a GPU by `multiply`."""
        x = self.folded(layer, x)
        if not self.has_kernels(layer, x):
            y = F.linear(x, self.dequantized(layer, x.dtype), layer.bias)
            return y if residual is None else residual.add_(y)
        from folovllm.quantization.kernels.quant_matmul import multiply

        y = multiply(x, self.weight_of(layer), residual)
        return y if layer.bias is None else y.add_(layer.bias)

    def fused(
        self, layer: LinearBase, x: torch.Tensor, norm_eps: float | None, gated: bool, residual: torch.Tensor | None
    ) -> torch.Tensor:
        """As `WeightFormat`."""
        from folovllm.quantization.kernels.quant_gemv import quant_gemv

        return quant_gemv(x, self.weight_of(layer), norm_eps, gated, residual, layer.columns)

    def fuses(self, layer: LinearBase, x: torch.Tensor) -> bool:
        """True for few tokens and no bias, on a card whose tensor cores serve few tokens."""
        if layer.bias is not None or not self.has_kernels(layer, x):
            return False
        from folovllm.quantization.kernels.quant_gemv import FEW, serves

        return len(x) in FEW and serves(x)

    def has_kernels(self, layer: LinearBase, x: torch.Tensor) -> bool:
        """Whether a kernel can multiply: on a GPU, and where it can read the scales."""
        return self.is_aligned(layer) and on_gpu(x)

    def is_aligned(self, layer: LinearBase) -> bool:
        """Whether scales are for whole units, and rows of blocks do not overlap."""
        rows, columns = self.block_of(layer.input_size)
        overlap = any(size % rows for size in layer.output_sizes[:-1])
        return layer.input_size % 16 == columns % 16 == 0 and not overlap

    def check_stack(self, layer: LinearBase) -> None:
        """As `WeightFormat`: a kernel must be able to read them."""
        if not self.is_aligned(layer):
            rows, columns = self.block_of(layer.input_size)
            raise ValueError(
                f"blocks of {rows} x {columns} weights with a scale do not divide [{layer.output_sizes[0]}, "
                f"{layer.input_size}] into multiples of 16 inputs"
            )

    def weight_of(self, layer: LinearBase) -> QuantizedWeight:
        """As `QuantizedWeights`."""
        return QuantizedWeight(layer.weight, layer.scale, *self.block_of(layer.input_size))

    def dequantized(self, layer: LinearBase, dtype: torch.dtype, parts: slice = ALL) -> torch.Tensor:
        """As `WeightFormat`: the one copy that is made."""
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


class PerOutput:
    """A scale for each output, [outputs] or [outputs, 1], seen as [outputs, inputs] of which inputs are not asked for."""

    def __init__(self, stored: Weight) -> None:
        self.stored, self.shape = stored, torch.Size([stored.shape[0], 0])

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self.stored[index[0] if isinstance(index, tuple) else index]


class PerBlock:
    """A scale for each block, seen as [outputs, inputs]. Slices begin and end between blocks (`Scaled.check_part`)."""

    def __init__(self, stored: Weight, block: tuple[int, int]) -> None:
        rows, columns = block
        self.stored, self.block = stored, block
        self.shape = torch.Size([stored.shape[0] * rows, stored.shape[1] * columns])

    def __getitem__(self, index: Any) -> torch.Tensor:
        slices = index if isinstance(index, tuple) else (index, slice(None))
        return self.stored[tuple(shrunk(one, size) for one, size in zip(slices, self.block, strict=True))]


def shrunk(span: slice, size: int) -> slice:
    """A slice in units of `size`."""
    return slice(*(None if end is None else end // size for end in (span.start, span.stop)))
