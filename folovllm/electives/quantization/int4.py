"""Weights of 4 bits in groups of inputs: brought into our order as they are loaded, sorted, and multiplied on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import torch

from folovllm.electives.quantization import packing
from folovllm.electives.quantization.linear_method import Quantized, keep, state_of
from folovllm.electives.quantization.weight import QuantizedWeight

if TYPE_CHECKING:
    from folovllm.layers.linear import LinearBase


@dataclass(frozen=True)
class Int4(Quantized):
    """W is (code - zero) * scale, or code * scale + minimum. A group is a multiple of 32 inputs of one output."""

    multiple: ClassVar[int] = 32  # what a thread of the kernel reads at once

    def block_of(self, inputs: int) -> tuple[int, int]:
        _, size = super().block_of(inputs)
        if size % self.multiple or inputs % size:
            raise ValueError(
                f"weights of 4 bits in groups of {size} of {inputs} inputs are not supported: a group must be a multiple "
                f"of {self.multiple}, and divide the inputs"
            )
        return 1, size

    def groups_of(self, inputs: int) -> torch.Tensor:
        """Return the group of each input, int32 [inputs], where they come in order."""
        return torch.arange(inputs, dtype=torch.int32) // self.block_of(inputs)[1]

    def check_ignored(self, name: str, tensor: torch.Tensor) -> None:
        """Raise ValueError if `g_idx` is neither all 0 nor the groups in order."""
        if name.endswith(".g_idx") and tensor.any() and not torch.equal(tensor.int(), self.groups_of(tensor.numel())):
            raise ValueError(
                f"{name!r} puts inputs into groups in an order of their own, of which config.json says nothing: set "
                '"desc_act": true in the quantization_config there'
            )

    def repack(self, kind: str, tensor: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """As `Quantized`, with codes in the order of `pack_planes`. Raises ValueError if `g_idx` gives groups different numbers of inputs."""
        found = super().repack(kind, tensor, shape)
        if kind == self.layout.codes and self.layout.unpack is not None:
            return packing.pack_planes(found, self.block_of(found.shape[1])[1])
        if kind == self.layout.order:
            groups = self.groups_of(tensor.numel())
            if not torch.equal(tensor.flatten().sort().values.cpu(), groups):
                size = len(groups) // (int(groups[-1]) + 1)
                raise ValueError(f"it does not put {size} inputs into each group: such checkpoints are not supported")
        return found

    def loaded(self, layer: LinearBase) -> None:
        """Sort the inputs, if the checkpoint has an order; keep scales and zeros in the shortest dtype that holds them."""
        super().loaded(layer)
        state, weight = state_of(layer), self.weight_of(layer)
        if state.order is not None:
            weight, state.order = sorted_by_group(weight, state.order.view(len(layer.output_sizes), -1))
        zeros = weight.zeros
        if zeros is not None:
            zeros = narrowest(zeros) if self.layout.has_minimums else None if (zeros == 8).all() else zeros
        weight = replace(weight, scale=narrowest(weight.scale), zeros=zeros)
        is_stack = getattr(layer, "is_stack", False)  # of which single experts are unpacked
        state.library = None if is_stack else library_product(weight, layer.bias, state.dtype)
        keep(layer, weight if state.library is None else None)


def sorted_by_group(weight: QuantizedWeight, groups: torch.Tensor) -> tuple[QuantizedWeight, torch.Tensor | None]:
    """Return W with its inputs sorted by group, and their order [inputs]; None where they have been in order.

    `groups` [parts, inputs] is the group of each. Raises ValueError if parts of a merged layer differ.
    """
    if (groups != groups[0]).any():
        raise ValueError("g_idx differs between layers that are merged here, which is not supported")
    order = groups[0].argsort(stable=True)
    words = packing.pack_planes(weight.codes[:, order], weight.columns)
    return replace(weight, weight=words), None if (order[1:] > order[:-1]).all() else order


def library_product(
    weight: QuantizedWeight, bias: torch.Tensor | None, dtype: torch.dtype
) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """Return what computes x W^T + b with torch's kernel for 4 bits on CPU; None where it does not take the weight, or is slow.

    It rounds scales and minimums to bfloat16: its W is (code - 8) * scale + minimum. In other dtypes it is slower than
    unpacking the codes.
    """
    is_fast = weight.scale.device.type == "cpu" and dtype == torch.bfloat16
    if not is_fast or len(weight.scale) % 16 or weight.columns not in (32, 64, 128, 256):
        return None
    scales, minimums = weight.scales_and_minimums()
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(weight.codes.int(), 1)
    factors = torch.stack((scales, minimums + 8 * scales), -1).transpose(0, 1)  # [groups, outputs, 2]
    factors, multiply = factors.to(torch.bfloat16).contiguous(), torch.ops.aten._weight_int4pack_mm_for_cpu
    group_size = weight.columns  # and nothing else of the weight, which is let go

    def product(x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = multiply(x.contiguous(), packed, group_size, factors)
        return y if bias is None else y.add_(bias)

    return product


def narrowest(numbers: torch.Tensor) -> torch.Tensor:
    """Return the same float32 numbers in 16 bits, if these hold them exactly."""
    for dtype in (torch.float16, torch.bfloat16):
        if torch.equal(numbers.to(dtype).float(), numbers):
            return numbers.to(dtype)
    return numbers
