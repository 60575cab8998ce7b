"""Weights of 8 bits times scales: what FP8 and INT8 have in common, and INT8.

A scale is for a tensor, for an output, or for a block: of 128 x 128 in Qwen's and DeepSeek's checkpoints in FP8.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import nn

from folovllm.electives.quantization.linear_method import (
    Dtypes,
    QuantizedLinearMethod,
    StoredView,
    require_sizes,
    rows_of,
)
from folovllm.electives.quantization.weight import QuantizedWeight
from folovllm.layers.fusable import ALL

if TYPE_CHECKING:
    from folovllm.distributed.sharding import Weight
    from folovllm.layers.fusable import Cut
    from folovllm.layers.linear import LinearBase


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
    weight_name: ClassVar[str] = "weight"  # what the checkpoint calls the codes
    random_std: ClassVar[float]  # standard deviation of made-up codes
    # Activations stay as they are, and codes of which zero is zero need none to be named.
    ignores: ClassVar[tuple[str, ...]] = ("input_scale", "activation_scale", "weight_zero_point")

    def __post_init__(self) -> None:
        require_sizes("a block of weights with a scale", *(self.block or ()))

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
        return {self.weight_name: codes, self.scale_name: torch.split(layer.scale.data, self.scale_rows(layer))}

    def repack(self, kind: str, tensor: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """A single scale, [] or [1], is that of all outputs; one for each output may come without its last dimension."""
        if kind != self.scale_name:
            return tensor
        if tensor.numel() == 1:
            return tensor.reshape(1, 1).expand(shape)
        return tensor[:, None] if len(tensor.shape) == 1 else tensor

    def fill(self, kind: str, tensor: torch.Tensor, generator: torch.Generator) -> None:
        """Make up codes with a standard deviation of `random_std`, and scales that bring it to 0.02."""
        if kind == self.scale_name:
            tensor.fill_(0.02 / self.random_std)
        elif kind == self.weight_name:
            drawn = torch.empty(tensor.shape, device=tensor.device).normal_(0.0, self.random_std, generator=generator)
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
        scale = tensor[...]
        if scale.numel() == 1:
            return scale
        return cut(StoredView(scale[:, None] if scale.dim() == 1 else scale, self.block or (1, 1)))

    def fuses(self, layer: LinearBase, x: torch.Tensor) -> bool:
        """Return True for few tokens and no bias, on a card whose tensor cores can take few tokens."""
        if not super().fuses(layer, x):
            return False
        from folovllm.electives.quantization.kernels.quant_gemv import is_supported

        return is_supported(x)

    def has_kernels(self, layer: LinearBase, x: torch.Tensor) -> bool:
        """Return whether a kernel multiplies: on a GPU, where it can read the scales."""
        return self.is_aligned(layer) and super().has_kernels(layer, x)

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
class Int8(Scaled):
    """Codes are int8. Activations stay as they are."""

    codes = torch.int8
    dtypes: ClassVar[Dtypes] = {"weight": ("I8",)}
    random_std = 32.0


@dataclass(frozen=True)
class PackedInt8(Int8):
    """The checkpoint has four codes in an int32, the first in its lowest byte, and 128 more than they are."""

    weight_name = "weight_packed"
    dtypes: ClassVar[Dtypes] = {"weight_packed": ("I32",)}
    ignores = (*Int8.ignores, "weight_shape")

    def repack(self, kind: str, tensor: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """Codes get their sign, and are seen one by one."""
        if kind != "weight_packed":
            return super().repack(kind, tensor, shape)
        return (tensor ^ FROM_UNSIGNED).view(torch.int8)
