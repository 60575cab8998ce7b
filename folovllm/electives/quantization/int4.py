"""Linear layers with weights of 4 bits in groups of inputs, in one layout.

Checkpoints have several layouts (`int4_checkpoints`). Loading brings all into this one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, cast

import torch
import torch.nn.functional as F

from folovllm.electives.quantization import packing
from folovllm.electives.quantization.linear_method import QuantizedLinearMethod, on_gpu, rows_of
from folovllm.electives.quantization.weight import QuantizedWeight
from folovllm.engine.require import is_whole
from folovllm.layers.fusable import ALL
from folovllm.layers.linear import FLOATS

if TYPE_CHECKING:
    from folovllm.layers.linear import LinearBase

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
        kept = Grouped(words, torch.empty(outputs, groups, dtype=torch.float32))
        layer.grouped = kept  # type: ignore[assignment]  # torch keeps what is no tensor as it is
        if self.with_zeros:
            kept.zeros = torch.empty(outputs, groups, dtype=torch.float32 if self.with_minimum else torch.uint8)
        if self.order_name:
            kept.order = torch.empty(len(layer.output_sizes), layer.input_size, dtype=torch.int32)

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
        kept = grouped_of(layer)
        sizes, tensors = layer.output_sizes, zip(self.names, (kept.words, kept.scales, kept.zeros), strict=True)
        places = {name: torch.split(tensor, sizes) for name, tensor in tensors if tensor is not None}
        return places | ({} if self.order_name is None or kept.order is None else {self.order_name: tuple(kept.order)})

    def stored(self, kind: str) -> tuple[str, ...]:
        """Words and zeros are int32, all else floats."""
        words, _, zeros = self.names
        return ("I32",) if kind == words or (kind == zeros and not self.with_minimum) else FLOATS

    def repack(self, kind: str, tensor: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """Return the tensor. Raises ValueError where codes, scales or zeros are no matrix, which cannot be transposed."""
        if kind in self.names and tensor.dim() != 2:
            raise ValueError(f"{kind!r} in 4 bits has shape {list(tensor.shape)}, and must have two dimensions")
        return tensor

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
        kept = grouped_of(layer)
        if self.order_name:
            kept.sort(self.order_name)
        kept.scales = narrowest(kept.scales)
        if kept.zeros is not None and self.with_minimum:
            kept.zeros = narrowest(kept.zeros)
        elif kept.zeros is not None and (kept.zeros == 8).all():
            kept.zeros = None
        if not getattr(layer, "is_stack", False):  # single experts of a stack are unpacked
            kept.pack_for_library(layer.dtype)

    def check_stack(self, layer: LinearBase) -> None:
        """Raise ValueError where parts have their inputs in different orders."""
        if self.order_name:
            raise ValueError("each sorts its inputs in an order of its own (desc_act)")

    def dequantized(self, layer: LinearBase, dtype: torch.dtype, parts: slice = ALL) -> torch.Tensor:
        w: torch.Tensor = grouped_of(layer).rows(rows_of(layer.output_sizes, parts)).dequantized(dtype)
        return w

    def weight_of(self, layer: LinearBase) -> QuantizedWeight:
        weight: QuantizedWeight = grouped_of(layer).weight()
        return weight

    def product(self, layer: LinearBase, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        y: torch.Tensor = grouped_of(layer).product(self.folded(layer, x), residual)
        return y if layer.bias is None else y.add_(layer.bias)

    def fused(
        self, layer: LinearBase, x: torch.Tensor, norm_eps: float | None, gated: bool, residual: torch.Tensor | None
    ) -> torch.Tensor:
        from folovllm.electives.quantization.kernels.int4_linear import int4_linear
        from folovllm.electives.quantization.kernels.quant_gemv import quant_gemv, serves

        w = self.weight_of(layer)
        if x.itemsize == 2 and w.columns % WHOLE == 0 and serves(x):
            return quant_gemv(x, w, norm_eps, gated, residual, layer.columns)
        return int4_linear(x, w.weight, w.scale, w.zeros, norm_eps, gated, residual, layer.columns)

    def fuses(self, layer: LinearBase, x: torch.Tensor) -> bool:
        """Return True on a GPU for few tokens, no bias, and inputs that are not sorted."""
        if layer.bias is not None or grouped_of(layer).order is not None or not on_gpu(x):
            return False
        from folovllm.electives.quantization.kernels.quant_gemv import FEW

        return len(x) in FEW


@dataclass(slots=True)
class Grouped:
    """W [outputs, inputs] is (code - zero) * scale, or code * scale + minimum.

    Attributes:
        words: [outputs, inputs / 8] int32, in the order of `packing.pack_planes`. None where `library` has them.
        scales: [outputs, groups], in the shortest floats that hold them.
        zeros: [outputs, groups]: codes, uint8; or minimums, floats. None: all are 8.
        order: [inputs], or None: the input that W's first column is for, its second, ...
        library: the weight as torch's kernel on CPU takes it.
    """

    words: torch.Tensor | None
    scales: torch.Tensor
    zeros: torch.Tensor | None = None
    order: torch.Tensor | None = None
    library: LibraryWeight | None = None

    def codes(self) -> torch.Tensor:
        """Return the codes [outputs, inputs] uint8, with columns in the order of `order`."""
        assert self.words is not None
        return packing.unpack_planes(self.words, self.group_size)

    @property
    def group_size(self) -> int:
        """Return how many inputs share a scale."""
        assert self.words is not None
        return packing.PER_WORD * self.words.shape[1] // self.scales.shape[1]

    def sort(self, name: str) -> None:
        """Sort the inputs by group. Before, `order` [parts, inputs] is the group of each; afterwards it is the order, or None.

        Raises:
            ValueError: parts of a merged layer differ, or groups have different sizes; `name` is that of the tensor.
        """
        assert self.order is not None
        order = self.order[0].argsort(stable=True)
        by_group = torch.arange(len(order), device=order.device) // self.group_size
        if (self.order[:, order] != by_group).any():
            raise ValueError(
                f"{name} does not put {self.group_size} inputs into each group, the same for all parts of a merged layer: "
                "such checkpoints are not supported"
            )
        self.words = packing.pack_planes(self.codes()[:, order], self.group_size)
        self.order = None if (order[1:] > order[:-1]).all() else order

    def pack_for_library(self, dtype: torch.dtype) -> None:
        """Pack the weight for torch's kernel, where that is faster. `dtype` is that of activations."""
        if self.scales.device.type == "cpu" and LibraryWeight.serves(len(self.scales), self.group_size, dtype):
            self.library = LibraryWeight(self.codes(), *self.scales_and_minimums())
            self.words = None

    def rows(self, rows: slice) -> Grouped:
        """Return views of some of W's rows."""
        assert self.words is not None
        zeros = None if self.zeros is None else self.zeros[rows]
        return replace(self, words=self.words[rows], scales=self.scales[rows], zeros=zeros)

    def scales_and_minimums(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return two tensors [outputs, groups] float32: W is code * scale + minimum. Both are exact, since codes are small."""
        scales = self.scales.float()
        if self.zeros is None:
            return scales, -8 * scales
        zeros = self.zeros.float()
        return scales, zeros if self.zeros.is_floating_point() else -zeros * scales

    def dequantized(self, dtype: torch.dtype) -> torch.Tensor:
        """Return W in `dtype`, computed in float32 and rounded once."""
        scales, minimums = self.scales_and_minimums()
        codes = self.codes().float().unflatten(1, (scales.shape[1], -1))  # [outputs, groups, group_size]
        return codes.mul_(scales[..., None]).add_(minimums[..., None]).flatten(1).to(dtype)

    def product(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """Return x W^T, [T, inputs] -> [T, outputs]; added to `residual`, which may be written over, where there is one."""
        if self.order is not None:
            x = x[:, self.order]
        if on_gpu(x):
            from folovllm.electives.quantization.kernels.quant_matmul import multiply

            return multiply(x, self.weight(), residual)
        y = F.linear(x, self.dequantized(x.dtype)) if self.library is None else self.library.product(x)
        return y if residual is None else residual.add_(y)

    def weight(self) -> QuantizedWeight:
        """Return the weight as kernels read it."""
        assert self.words is not None
        return QuantizedWeight(self.words, self.scales, 1, self.group_size, self.zeros)


def grouped_of(layer: LinearBase) -> Grouped:
    """Return what `create` gave the layer."""
    return cast(Grouped, layer.grouped)


class LibraryWeight:
    """A weight as torch's kernel for 4 bits on CPU takes it, which rounds scales and minimums to bfloat16.

    In other dtypes that kernel is slower than unpacking the codes.
    """

    def __init__(self, codes: torch.Tensor, scales: torch.Tensor, minimums: torch.Tensor) -> None:
        """Pack codes [outputs, inputs] and the numbers of each group. The kernel's W is (code - 8) * scale + minimum."""
        self.group_size = codes.shape[1] // scales.shape[1]
        self.packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.int(), 1)
        scales = torch.stack((scales, minimums + 8 * scales), -1).transpose(0, 1)  # [groups, outputs, 2]
        self.scales = scales.to(torch.bfloat16).contiguous()

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """Return x W^T."""
        y: torch.Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(
            x.contiguous(), self.packed, self.group_size, self.scales
        )
        return y

    @staticmethod
    def serves(outputs: int, group_size: int, dtype: torch.dtype) -> bool:
        """Return whether the kernel takes such weights, and is fast."""
        return dtype == torch.bfloat16 and outputs % 16 == 0 and group_size in (32, 64, 128, 256)


def narrowest(numbers: torch.Tensor) -> torch.Tensor:
    """Return the same float32 numbers in 16 bits, if these hold them exactly."""
    for dtype in (torch.float16, torch.bfloat16):
        if torch.equal(numbers.to(dtype).float(), numbers):
            return numbers.to(dtype)
    return numbers
