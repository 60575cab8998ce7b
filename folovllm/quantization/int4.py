"""Weights as codes of 4 bits in groups of inputs, in one layout, whoever quantized them.

Those who write checkpoints each have a layout of their own: `int4_checkpoints`. Loading brings all into this one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from folovllm.layers.linear_method import ALL, FLOATS
from folovllm.quantization import packing
from folovllm.quantization.grouped import Grouped, narrowest
from folovllm.quantization.linear_method import QuantizedLinearMethod, rows_of
from folovllm.require import is_whole

if TYPE_CHECKING:
    from folovllm.layers.linear import LinearBase
    from folovllm.quantization.weight import QuantizedWeight

MULTIPLE = 32  # of inputs that a group has: what a thread of the kernel reads at once
WHOLE = 128  # inputs that 16 words hold: of shorter groups, tensor cores would have numbers move between threads
STEPS = 4.6  # standard deviation of random codes


@dataclass(frozen=True)
class Int4(QuantizedLinearMethod):
    """W is (code - zero) * scale, or code * scale + minimum; a layer keeps a `Grouped`.

    Attributes:
        group_size: inputs that share a scale, a multiple of 32; None: all of them.
        with_zeros: whether the checkpoint has zeros, or minimums.
        with_minimum: it has those: floats, not codes.
    """

    group_size: int | None = None
    with_zeros: bool = False
    with_minimum: bool = False

    names: ClassVar[tuple[str, str, str]] = ("words", "scales", "zeros")  # as a checkpoint calls them
    order_name: ClassVar[str | None] = None  # what says which group an input is in

    def __post_init__(self) -> None:
        """Raise ValueError where a checkpoint's group is none."""
        if self.group_size is not None and not (is_whole(self.group_size) and self.group_size > 0):
            raise ValueError(f"group_size is {self.group_size!r}, and must be a whole number of at least 1")

    def create(self, layer: LinearBase) -> None:
        """Make words, float32 scales, and zeros."""
        super().create(layer)
        outputs, groups = sum(layer.output_sizes), layer.input_size // self.group_size_of(layer.input_size)
        words = torch.empty(outputs, layer.input_size // packing.PER_WORD, dtype=torch.int32)
        layer.grouped = Grouped(words, torch.empty(outputs, groups, dtype=torch.float32))
        if self.with_zeros:
            layer.grouped.zeros = torch.empty(
                outputs, groups, dtype=torch.float32 if self.with_minimum else torch.uint8
            )
        if self.order_name:
            layer.grouped.order = torch.empty(len(layer.output_sizes), layer.input_size, dtype=torch.int32)

    def group_size_of(self, inputs: int) -> int:
        """Inputs that share a scale. Raises ValueError where they do not fill a row, or the kernel's reads."""
        size = self.group_size or inputs
        if size % MULTIPLE or inputs % size:
            raise ValueError(
                f"weights of 4 bits in groups of {size} of {inputs} inputs are not supported: a group must be a multiple "
                f"of {MULTIPLE}, and divide the inputs"
            )
        return size

    def places(self, layer: LinearBase) -> dict[str, Sequence[torch.Tensor]]:
        """The rows of each part."""
        kept: Grouped = layer.grouped
        sizes, tensors = layer.output_sizes, zip(self.names, (kept.words, kept.scales, kept.zeros), strict=True)
        places = {name: torch.split(tensor, sizes) for name, tensor in tensors if tensor is not None}
        return places | ({} if self.order_name is None or kept.order is None else {self.order_name: tuple(kept.order)})

    def stored(self, kind: str) -> tuple[str, ...]:
        """Words and zeros are int32, all else floats."""
        words, _, zeros = self.names
        return ("I32",) if kind == words or (kind == zeros and not self.with_minimum) else FLOATS

    def arrange(self, kind: str, tensor: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """As `LinearMethod`. Raises ValueError where codes, scales or zeros are no matrix: they could not be turned over."""
        if kind in self.names and tensor.dim() != 2:
            raise ValueError(f"{kind!r} in 4 bits has shape {list(tensor.shape)}, and must have two dimensions")
        return tensor

    def check_part(self, outputs: int, inputs: int) -> None:
        """As `LinearMethod`: a border between ranks must be one between groups, and no word may lie across it."""
        if self.order_name:
            raise ValueError("its inputs are sorted (desc_act), so those of a group lie on all ranks")
        if outputs % packing.PER_WORD or inputs % (self.group_size or MULTIPLE):
            raise ValueError(
                f"a rank's part [{outputs}, {inputs}] would not hold whole groups of {self.group_size or MULTIPLE} inputs, "
                f"or not a multiple of {packing.PER_WORD} outputs"
            )

    def fill(self, kind: str, tensor: torch.Tensor, generator: torch.Generator) -> None:
        """As `LinearMethod`: random bits, and one scale."""
        if kind == self.names[0]:
            tensor.random_(-(2**31), 2**31 - 1, generator=generator)
        elif kind == self.names[1]:
            tensor.fill_(0.02 / STEPS)
        else:
            super().fill(kind, tensor, generator)

    def num_bytes(self, outputs: int, inputs: int, dtype: torch.dtype) -> int:
        """As `LinearMethod`: half a byte for each; of each group a scale of two bytes, and a zero of one or two."""
        per_group = 2 + self.with_zeros + self.with_minimum
        return outputs * inputs // 2 + per_group * outputs * inputs // self.group_size_of(inputs)

    def loaded(self, layer: LinearBase) -> None:
        """Sort the inputs, if that is asked for; keep no more of scales and zeros than there is in them."""
        super().loaded(layer)
        kept: Grouped = layer.grouped
        if self.order_name:
            kept.sort(self.order_name)
        kept.scales = narrowest(kept.scales)
        if kept.zeros is not None and self.with_minimum:
            kept.zeros = narrowest(kept.zeros)
        elif kept.zeros is not None and (kept.zeros == 8).all():
            kept.zeros = None
        if not layer.is_stack:  # of which single experts are unpacked
            kept.settle(layer.dtype)

    def check_stack(self, layer: LinearBase) -> None:
        """As `LinearMethod`: all rows must have their inputs in one order."""
        if self.order_name:
            raise ValueError("each sorts its inputs in an order of its own (desc_act)")

    def dequantized(self, layer: LinearBase, dtype: torch.dtype, parts: slice = ALL) -> torch.Tensor:
        """As `LinearMethod`."""
        w: torch.Tensor = layer.grouped.rows(rows_of(layer.output_sizes, parts)).dequantized(dtype)
        return w

    def weight_of(self, layer: LinearBase) -> QuantizedWeight:
        """As `QuantizedLinearMethod`."""
        weight: QuantizedWeight = layer.grouped.weight()
        return weight

    def product(self, layer: LinearBase, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """As `LinearMethod`."""
        y: torch.Tensor = layer.grouped.product(self.folded(layer, x), residual)
        return y if layer.bias is None else y.add_(layer.bias)

    def fused(
        self, layer: LinearBase, x: torch.Tensor, norm_eps: float | None, gated: bool, residual: torch.Tensor | None
    ) -> torch.Tensor:
        """As `LinearMethod`: on the tensor cores, where they are fast."""
        from folovllm.quantization.kernels.int4_linear import int4_linear
        from folovllm.quantization.kernels.quant_gemv import quant_gemv, serves

        w = self.weight_of(layer)
        if x.itemsize == 2 and w.columns % WHOLE == 0 and serves(x):
            return quant_gemv(x, w, norm_eps, gated, residual, layer.columns)
        return int4_linear(x, w.weight, w.scale, w.zeros, norm_eps, gated, residual, layer.columns)

    def fuses(self, layer: LinearBase, x: torch.Tensor) -> bool:
        """True for few tokens and no bias."""
        return layer.bias is None and bool(layer.grouped.fuses(x))
