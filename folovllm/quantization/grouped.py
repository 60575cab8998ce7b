"""A weight of 4-bit codes: what is kept of it, and its product on each kind of device."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from folovllm.quantization import packing
from folovllm.quantization.linear_method import on_gpu
from folovllm.quantization.weight import QuantizedWeight


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
        """[outputs, inputs] uint8, W's columns in their own order."""
        assert self.words is not None
        return packing.unpack_planes(self.words, self.group_size)

    @property
    def group_size(self) -> int:
        """Inputs that share a scale."""
        assert self.words is not None
        return packing.PER_WORD * self.words.shape[1] // self.scales.shape[1]

    def sort(self, name: str) -> None:
        """Bring the inputs of a group together. Until now `order` [parts, inputs] has said which group each is in.

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

    def settle(self, dtype: torch.dtype) -> None:
        """All is there: let the library have it, where that is faster. `dtype` is that of activations."""
        if self.scales.device.type == "cpu" and LibraryWeight.serves(len(self.scales), self.group_size, dtype):
            self.library = LibraryWeight(self.codes(), *self.scales_and_minimums())
            self.words = None

    def rows(self, rows: slice) -> Grouped:
        """Some of W's rows: views."""
        assert self.words is not None
        zeros = None if self.zeros is None else self.zeros[rows]
        return replace(self, words=self.words[rows], scales=self.scales[rows], zeros=zeros)

    def scales_and_minimums(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Two [outputs, groups] float32: W is code * scale + minimum. Both are exact, for codes are small."""
        scales = self.scales.float()
        if self.zeros is None:
            return scales, -8 * scales
        zeros = self.zeros.float()
        return scales, zeros if self.zeros.is_floating_point() else -zeros * scales

    def dequantized(self, dtype: torch.dtype) -> torch.Tensor:
        """W in `dtype`, computed in float32 and rounded once."""
        scales, minimums = self.scales_and_minimums()
        codes = self.codes().float().unflatten(1, (scales.shape[1], -1))  # [outputs, groups, group_size]
        return codes.mul_(scales[..., None]).add_(minimums[..., None]).flatten(1).to(dtype)

    def product(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """x W^T: [T, inputs] -> [T, outputs]; added to `residual`, which may be written over, where there is one."""
        if self.order is not None:
            x = x[:, self.order]
        if on_gpu(x):
            from folovllm.quantization.kernels.quant_matmul import multiply

            return multiply(x, self.weight(), residual)
        y = F.linear(x, self.dequantized(x.dtype)) if self.library is None else self.library.product(x)
        return y if residual is None else residual.add_(y)

    def weight(self) -> QuantizedWeight:
        """As kernels read it."""
        assert self.words is not None
        return QuantizedWeight(self.words, self.scales, 1, self.group_size, self.zeros)

    def fuses(self, x: torch.Tensor) -> bool:
        """Whether one kernel can multiply these with all that comes before and after: few tokens, and inputs as they come."""
        if self.order is not None or not on_gpu(x):
            return False
        from folovllm.quantization.kernels.quant_gemv import FEW

        return len(x) in FEW


class LibraryWeight:
    """The same as torch's kernel for 4 bits on CPU takes it, which rounds scales and minimums to bfloat16.

    In other dtypes that kernel is slower than unpacking the codes.
    """

    def __init__(self, codes: torch.Tensor, scales: torch.Tensor, minimums: torch.Tensor) -> None:
        """From codes [outputs, inputs] and what belongs to each group. The kernel's W is (code - 8) * scale + minimum."""
        self.group_size = codes.shape[1] // scales.shape[1]
        self.packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.int(), 1)
        scales = torch.stack((scales, minimums + 8 * scales), -1).transpose(0, 1)  # [groups, outputs, 2]
        self.scales = scales.to(torch.bfloat16).contiguous()

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """x W^T."""
        y: torch.Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(
            x.contiguous(), self.packed, self.group_size, self.scales
        )
        return y

    @staticmethod
    def serves(outputs: int, group_size: int, dtype: torch.dtype) -> bool:
        """Whether the kernel takes such weights, and is fast."""
        has_kernel = dtype == torch.bfloat16 and hasattr(torch.ops.aten, "_weight_int4pack_mm_for_cpu")
        return has_kernel and outputs % 16 == 0 and group_size in (32, 64, 128, 256)


def narrowest(numbers: torch.Tensor) -> torch.Tensor:
    """The same float32 numbers in 16 bits, if these hold them exactly."""
    for dtype in (torch.float16, torch.bfloat16):
        if torch.equal(numbers.to(dtype).float(), numbers):
            return numbers.to(dtype)
    return numbers
