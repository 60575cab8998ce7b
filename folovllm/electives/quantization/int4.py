"""Linear layers with weights of 4 bits in groups of inputs, in one layout.

Checkpoints have several layouts (`int4_checkpoints`). Loading brings all into this one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, cast

import torch

from folovllm.electives.quantization import packing
from folovllm.electives.quantization.linear_method import Dtypes, QuantizedLinearMethod, require_sizes, rows_of
from folovllm.electives.quantization.weight import QuantizedWeight
from folovllm.layers.fusable import ALL

if TYPE_CHECKING:
    from folovllm.layers.linear import LinearBase

MULTIPLE = 32  # of inputs that a group has: what a thread of the kernel reads at once
FULL = 128  # inputs that 16 words hold: of shorter groups, tensor cores would have numbers move between threads
STEPS = 4.6  # standard deviation of random codes


@dataclass(frozen=True)
class Int4(QuantizedLinearMethod):
    """W is (code - zero) * scale, or code * scale + minimum; a layer keeps an `Int4Weight`.

    Attributes:
        group_size: inputs that share a scale, a multiple of 32; None: all of them.
        with_zeros: whether the checkpoint has zeros, or minimums.
        with_minimum: it has those: floats, not codes.
    """

    group_size: int | None = None
    with_zeros: bool = False
    with_minimum: bool = False

    names: ClassVar[tuple[str, str, str]] = ("words", "scales", "zeros")  # as a checkpoint calls them
    dtypes: ClassVar[Dtypes] = {"words": ("I32",)}
    order_name: ClassVar[str | None] = None  # what says which group an input is in

    def __post_init__(self) -> None:
        require_sizes("group_size", 1 if self.group_size is None else self.group_size)

    def create(self, layer: LinearBase) -> None:
        """Make words, float32 scales, and zeros."""
        super().create(layer)
        outputs, size = sum(layer.output_sizes), self.group_size_of(layer.input_size)
        words = torch.empty(outputs, layer.input_size // packing.PER_WORD, dtype=torch.int32)
        scales = torch.empty(outputs, layer.input_size // size, dtype=torch.float32)
        zeros = torch.empty_like(scales, dtype=torch.float32 if self.with_minimum else torch.uint8)
        order = torch.empty(len(layer.output_sizes), layer.input_size, dtype=torch.int32)
        weight = QuantizedWeight(words, scales, 1, size, zeros if self.with_zeros else None)
        layer.int4 = Int4Weight(weight, order if self.order_name else None)  # type: ignore[assignment]  # no tensor

    def group_size_of(self, inputs: int) -> int:
        """Return how many inputs share a scale. Raises ValueError where these do not fill a row, or the kernel's reads."""
        size = self.group_size or inputs
        if size % MULTIPLE or inputs % size:
            raise ValueError(
                f"weights of 4 bits in groups of {size} of {inputs} inputs are not supported: a group must be a multiple "
                f"of {MULTIPLE}, and divide the inputs"
            )
        return size

    def weight_views(self, layer: LinearBase) -> dict[str, Sequence[torch.Tensor]]:
        """Return the rows of each part."""
        weight, order = self.weight_of(layer), int4_of(layer).order
        tensors = zip(self.names, (weight.weight, weight.scale, weight.zeros), strict=True)
        views: dict[str, Sequence[torch.Tensor]] = {
            name: torch.split(tensor, layer.output_sizes) for name, tensor in tensors if tensor is not None
        }
        if self.order_name is not None and order is not None:
            views[self.order_name] = tuple(order)
        return views

    def check_part(self, outputs: int, inputs: int) -> None:
        """Raise ValueError unless ranks can have whole groups and whole words."""
        if self.order_name:
            raise ValueError("its inputs are sorted (desc_act), so those of a group lie on all ranks")
        if outputs % packing.PER_WORD or inputs % (self.group_size or MULTIPLE):
            raise ValueError(
                f"a rank's part [{outputs}, {inputs}] would not hold whole groups of {self.group_size or MULTIPLE} inputs, "
                f"or not a multiple of {packing.PER_WORD} outputs"
            )

    def fill(self, kind: str, tensor: torch.Tensor, generator: torch.Generator) -> None:
        if kind == self.names[0]:
            tensor.random_(-(2**31), 2**31 - 1, generator=generator)
        elif kind == self.names[1]:
            tensor.fill_(torch.tensor(0.02 / STEPS).half())  # as checkpoints have them
        elif kind == self.names[2] and not self.with_minimum:
            tensor.fill_(8)
        else:
            super().fill(kind, tensor, generator)

    def num_bytes(self, outputs: int, inputs: int, dtype: torch.dtype) -> int:
        """Return half a byte for each weight, and of each group two bytes for the scale and one or two for the zero."""
        per_group = 2 + self.with_zeros + self.with_minimum
        return outputs * inputs // 2 + per_group * outputs * inputs // self.group_size_of(inputs)

    def loaded(self, layer: LinearBase) -> None:
        """Sort the inputs, if the checkpoint has an order; keep scales and zeros in the shortest dtype that holds them."""
        super().loaded(layer)
        kept = int4_of(layer)
        if self.order_name:
            kept.sort(self.order_name)
        weight = self.weight_of(layer)
        zeros = weight.zeros
        if zeros is not None and self.with_minimum:
            zeros = narrowest(zeros)
        elif zeros is not None and (zeros == 8).all():
            zeros = None
        weight = replace(weight, scale=narrowest(weight.scale), zeros=zeros)
        is_stack = getattr(layer, "is_stack", False)  # of which single experts are unpacked
        kept.library = None if is_stack else library_product(weight, layer.dtype)
        kept.weight = None if kept.library else weight

    def check_stack(self, layer: LinearBase) -> None:
        """Raise ValueError where parts have their inputs in different orders."""
        if self.order_name:
            raise ValueError("each sorts its inputs in an order of its own (desc_act)")

    def weight_of(self, layer: LinearBase) -> QuantizedWeight:
        """Return the weight as kernels read it. There is none where torch's kernel multiplies."""
        weight = int4_of(layer).weight
        assert weight is not None
        return weight

    def dequantized(self, layer: LinearBase, dtype: torch.dtype, parts: slice = ALL) -> torch.Tensor:
        weight, rows = self.weight_of(layer), rows_of(layer.output_sizes, parts)
        zeros = None if weight.zeros is None else weight.zeros[rows]
        return dequantized(replace(weight, weight=weight.weight[rows], scale=weight.scale[rows], zeros=zeros), dtype)

    def prepared(self, layer: LinearBase, x: torch.Tensor) -> torch.Tensor:
        """Return `x` times what was folded into the weights, in the order of the weights' columns."""
        x, order = super().prepared(layer, x), int4_of(layer).order
        return x if order is None else x[:, order]

    def product_without_kernels(self, layer: LinearBase, x: torch.Tensor) -> torch.Tensor:
        if (library := int4_of(layer).library) is None:
            return super().product_without_kernels(layer, x)
        y = library(x)
        return y if layer.bias is None else y.add_(layer.bias)

    def fuses(self, layer: LinearBase, x: torch.Tensor) -> bool:
        """Return True for few tokens, no bias, and inputs that are not sorted, where kernels multiply."""
        return int4_of(layer).order is None and super().fuses(layer, x)

    def fused(
        self, layer: LinearBase, x: torch.Tensor, norm_eps: float | None, gated: bool, residual: torch.Tensor | None
    ) -> torch.Tensor:
        from folovllm.electives.quantization.kernels.int4_linear import int4_linear
        from folovllm.electives.quantization.kernels.quant_gemv import is_supported

        w = self.weight_of(layer)
        if x.itemsize == 2 and w.columns % FULL == 0 and is_supported(x):
            return super().fused(layer, x, norm_eps, gated, residual)
        return int4_linear(x, w.weight, w.scale, w.zeros, norm_eps, gated, residual, layer.columns)


@dataclass(slots=True)
class Int4Weight:
    """The 4-bit weight that a layer keeps, in one layout for all checkpoints.

    Attributes:
        weight: as kernels read it. None where `library` has it.
        order: [inputs], or None: the input that W's first column is for, its second, ...
        library: what multiplies by torch's kernel on CPU, in its own layout.
    """

    weight: QuantizedWeight | None
    order: torch.Tensor | None = None
    library: Callable[[torch.Tensor], torch.Tensor] | None = None

    def sort(self, name: str) -> None:
        """Sort the inputs by group. Before, `order` [parts, inputs] is the group of each; afterwards it is the order, or None.

        Raises:
            ValueError: parts of a merged layer differ; `name` is that of the tensor.
        """
        assert self.order is not None and self.weight is not None
        if (self.order != self.order[0]).any():
            raise ValueError(f"{name} differs between layers that are merged here, which is not supported")
        order = self.order[0].argsort(stable=True)
        words = packing.pack_planes(codes_of(self.weight)[:, order], self.weight.columns)
        self.weight = replace(self.weight, weight=words)
        self.order = None if (order[1:] > order[:-1]).all() else order


def int4_of(layer: LinearBase) -> Int4Weight:
    """Return the weight that `create` gave the layer."""
    return cast(Int4Weight, layer.int4)


def codes_of(weight: QuantizedWeight) -> torch.Tensor:
    """Return the codes [outputs, inputs] uint8, with columns in the order of the words."""
    return packing.unpack_planes(weight.weight, weight.columns)


def scales_and_minimums(weight: QuantizedWeight) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two tensors [outputs, groups] float32: W is code * scale + minimum. Both are exact, since codes are small."""
    scales = weight.scale.float()
    if weight.zeros is None:
        return scales, -8 * scales
    zeros = weight.zeros.float()
    return scales, zeros if weight.zeros.is_floating_point() else -zeros * scales


def dequantized(weight: QuantizedWeight, dtype: torch.dtype) -> torch.Tensor:
    """Return W in `dtype`, computed in float32 and rounded once."""
    scales, minimums = scales_and_minimums(weight)
    codes = codes_of(weight).float().unflatten(1, (scales.shape[1], -1))  # [outputs, groups, group_size]
    return codes.mul_(scales[..., None]).add_(minimums[..., None]).flatten(1).to(dtype)


def library_product(weight: QuantizedWeight, dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """Return what multiplies `x` by W^T with torch's kernel for 4 bits on CPU; None where it does not take the weight, or is slow.

    It rounds scales and minimums to bfloat16: its W is (code - 8) * scale + minimum. In other dtypes it is slower than
    unpacking the codes.
    """
    is_fast = weight.scale.device.type == "cpu" and dtype == torch.bfloat16
    if not is_fast or len(weight.scale) % 16 or weight.columns not in (32, 64, 128, 256):
        return None
    scales, minimums = scales_and_minimums(weight)
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes_of(weight).int(), 1)
    factors = torch.stack((scales, minimums + 8 * scales), -1).transpose(0, 1)  # [groups, outputs, 2]
    factors, multiply = factors.to(torch.bfloat16).contiguous(), torch.ops.aten._weight_int4pack_mm_for_cpu
    group_size = weight.columns  # and nothing else of the weight, which is let go
    return lambda x: multiply(x.contiguous(), packed, group_size, factors)


def narrowest(numbers: torch.Tensor) -> torch.Tensor:
    """Return the same float32 numbers in 16 bits, if these hold them exactly."""
    for dtype in (torch.float16, torch.bfloat16):
        if torch.equal(numbers.to(dtype).float(), numbers):
            return numbers.to(dtype)
    return numbers
