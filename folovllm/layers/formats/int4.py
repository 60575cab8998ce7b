"""Weights as codes of 4 bits in groups of inputs, in one layout, whoever quantized them.

Those who write checkpoints each have a layout of their own: `int4_checkpoints`. Loading brings all into this one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from folovllm.layers.formats import packing
from folovllm.layers.formats.abstract import FLOATS, WeightFormat
from folovllm.quantize.groups import spread

if TYPE_CHECKING:
    from folovllm.layers.linear import LinearBase

MULTIPLE = 32  # of inputs that a group has: what a thread of the kernel reads at once
STEPS = 4.6  # standard deviation of random codes


@dataclass(frozen=True)
class Int4(WeightFormat):
    """W is (code - zero) * scale. It keeps `words` [outputs, inputs / 8] int32, in the order of `packing.pack_planes`, and

    - `scales` [outputs, groups], in the shortest floats that hold them;
    - `zeros` [outputs, groups]: uint8 codes, or None where all are 8; floats (`with_minimum`) are what code 0 stands for;
    - `order` [inputs], or None: which of the inputs comes first, second, ... where GPTQ has sorted them (`desc_act`).

    Attributes:
        group_size: inputs that share a scale, a multiple of 32; None: all of them.
        with_zeros: whether the checkpoint has zeros.
        with_minimum: those are no codes, but what is added to code * scale.
    """

    group_size: int | None = None
    with_zeros: bool = False
    with_minimum: bool = False

    names: ClassVar[tuple[str, str, str]] = ("words", "scales", "zeros")  # as a checkpoint calls them
    order_name: ClassVar[str | None] = None  # what says which group an input is in

    def create(self, layer: LinearBase) -> None:
        """Make words, float32 scales, and zeros."""
        group_size = self.group_size_of(layer.input_size)
        outputs, groups = sum(layer.output_sizes), layer.input_size // group_size
        layer.words = parameter(outputs, layer.input_size // packing.PER_WORD, dtype=torch.int32)
        layer.scales = parameter(outputs, groups, dtype=torch.float32)
        zeros = parameter(outputs, groups, dtype=torch.float32 if self.with_minimum else torch.uint8)
        layer.zeros = zeros if self.with_zeros else None
        layer.order = layer.in_library = None
        if self.order_name:
            layer.order = parameter(len(layer.output_sizes), layer.input_size, dtype=torch.int32)

    def group_size_of(self, inputs: int) -> int:
        """Inputs that share a scale. Raises ValueError where they do not fill a row, or the kernel's reads."""
        size = self.group_size or inputs
        if inputs % size or size % MULTIPLE:
            raise ValueError(
                f"weights of 4 bits need groups of a multiple of {MULTIPLE} inputs that divides the layer's: "
                f"{inputs} inputs in groups of {size} are not supported"
            )
        return size

    def places(self, layer: LinearBase) -> dict[str, Sequence[torch.Tensor]]:
        """The rows of each part."""
        kept = (layer.words, layer.scales, layer.zeros)
        sizes = layer.output_sizes
        places = {name: torch.split(p.data, sizes) for name, p in zip(self.names, kept, strict=True) if p is not None}
        return places | ({self.order_name: tuple(layer.order.data)} if self.order_name else {})

    def stored(self, kind: str) -> tuple[str, ...]:
        """Words are int32, zeros as well unless they are floats."""
        words, _, zeros = self.names
        return ("I32",) if kind == words or (kind == zeros and not self.with_minimum) else FLOATS

    def check_part(self, outputs: int, inputs: int) -> None:
        """As `WeightFormat`: a border between ranks must be one between groups, and no word may lie across it."""
        if self.order_name:
            raise ValueError("its inputs are sorted (desc_act), and what a rank needs lies on all of them")
        if outputs % packing.PER_WORD or inputs % (self.group_size or MULTIPLE):
            raise ValueError(
                f"a rank's part [{outputs}, {inputs}] would not hold whole groups of {self.group_size or MULTIPLE} inputs, "
                f"or not a multiple of {packing.PER_WORD} outputs"
            )

    def fill(self, kind: str, tensor: torch.Tensor, generator: torch.Generator) -> None:
        """As `WeightFormat`: random bits, and one scale."""
        if kind == self.names[0]:
            tensor.random_(-(2**31), 2**31 - 1, generator=generator)
        elif kind == self.names[1]:
            tensor.fill_(0.02 / STEPS)
        else:
            super().fill(kind, tensor, generator)

    def loaded(self, layer: LinearBase) -> None:
        """Sort the inputs, if that is asked for, and keep no more of scales and zeros than there is in them."""
        if self.order_name:
            self.sort(layer)
        layer.scales = frozen(narrowest(layer.scales.data))
        if layer.zeros is not None:
            if self.with_minimum:
                layer.zeros = frozen(narrowest(layer.zeros.data))
            elif (layer.zeros == 8).all():
                layer.zeros = None
        group_size = layer.input_size // layer.scales.shape[1]
        if layer.words.device.type == "cpu" and LibraryWeight.serves(len(layer.words), group_size):
            codes = packing.unpack_planes(layer.words.data, group_size)
            layer.in_library, layer.words = LibraryWeight(codes, *scales_and_minimums(layer)), None

    def sort(self, layer: LinearBase) -> None:
        """Bring the inputs of a group together, where `order` says which group each is in.

        Raises:
            ValueError: parts of a merged layer differ, or groups have different sizes.
        """
        group_size = self.group_size_of(layer.input_size)
        order = layer.order[0].argsort(stable=True)
        expected = torch.arange(layer.input_size, device=order.device) // group_size
        if (layer.order[:, order] != expected).any():
            raise ValueError(
                f"{self.order_name} does not put {group_size} inputs into each group, or not the same for all parts of a "
                "merged layer: this is not supported"
            )
        codes = packing.unpack_planes(layer.words.data, group_size)[:, order]
        layer.words = frozen(packing.pack_planes(codes, group_size))
        layer.order = None if torch.equal(order, torch.arange(len(order), device=order.device)) else frozen(order)

    def product(self, layer: LinearBase, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """As `WeightFormat`, on CPU by a kernel of torch's if there is one for these sizes."""
        if layer.order is not None:
            x = x[:, layer.order]
        y = F.linear(x, dequantized(layer, x.dtype)) if layer.in_library is None else layer.in_library.product(x)
        if layer.bias is not None:
            y += layer.bias
        return y if residual is None else residual.add_(y)


def dequantized(layer: LinearBase, dtype: torch.dtype) -> torch.Tensor:
    """W [outputs, inputs] in `dtype`, computed in float32 and rounded once; inputs are in the order of `layer.order`."""
    group_size = layer.input_size // layer.scales.shape[1]
    scales, minimums = scales_and_minimums(layer)
    codes = packing.unpack_planes(layer.words, group_size).float()
    return torch.addcmul(spread(minimums, group_size), codes, spread(scales, group_size)).to(dtype)


def scales_and_minimums(layer: LinearBase) -> tuple[torch.Tensor, torch.Tensor]:
    """Two [outputs, groups] float32: W is code * scale + minimum."""
    scales = layer.scales.float()
    if layer.zeros is None:
        return scales, -8 * scales
    return scales, layer.zeros.float() if layer.zeros.is_floating_point() else -layer.zeros * scales


class LibraryWeight:
    """The same weight as torch's kernel for 4 bits on CPU takes it. In 16 bits it rounds scales to those of `x`."""

    def __init__(self, codes: torch.Tensor, scales: torch.Tensor, minimums: torch.Tensor) -> None:
        """As `scales_and_minimums` has them. The kernel adds its minimum to (code - 8) * scale."""
        self.group_size = codes.shape[1] // scales.shape[1]
        self.packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.int(), 1)
        self.scales = torch.stack((scales, minimums + 8 * scales), -1).transpose(0, 1).contiguous()  # [groups, outputs, 2]

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """x W^T."""
        self.scales = self.scales.to(x.dtype)
        return torch.ops.aten._weight_int4pack_mm_for_cpu(x.contiguous(), self.packed, self.group_size, self.scales)

    @staticmethod
    def serves(outputs: int, group_size: int) -> bool:
        """Whether the kernel takes such weights."""
        has_kernel = hasattr(torch.ops.aten, "_weight_int4pack_mm_for_cpu")
        return has_kernel and outputs % 16 == 0 and group_size in (32, 64, 128, 256)


def narrowest(numbers: torch.Tensor) -> torch.Tensor:
    """The same float32 numbers in 16 bits, if these hold them exactly."""
    for dtype in (torch.float16, torch.bfloat16):
        if torch.equal(numbers.to(dtype).float(), numbers):
            return numbers.to(dtype)
    return numbers


def parameter(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    """An uninitialised one that is not trained."""
    return frozen(torch.empty(shape, dtype=dtype))


def frozen(tensor: torch.Tensor) -> nn.Parameter:
    """As a parameter that is not trained, which whole numbers cannot be."""
    return nn.Parameter(tensor, requires_grad=False)
