"""Numbers as codes of a few bits: each group of neighbouring inputs has a scale of its own, and a code that means zero.

A number is (code - zero) * scale. The more numbers share a scale, the coarser it is for most of them: a group is as
coarse as its largest number asks for.
"""

from __future__ import annotations

import torch


def quantize_groups(
    w: torch.Tensor, bits: int, group_size: int, symmetric: bool, lowest_zero: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Round each number to the nearest one that its group's scale and zero can express.

    Args:
        w: [outputs, inputs], floats. Inputs g * group_size to (g + 1) * group_size of an output are its group g.
        bits: of a code: 0 <= code < 2 ** bits.
        symmetric: zeros are all 2 ** (bits - 1), which many kernels need not even read.
        lowest_zero: zeros are at least this.

    Returns:
        codes [outputs, inputs] uint8; scales [outputs, groups] in w's dtype; zeros [outputs, groups] uint8.

    Raises:
        ValueError: group_size does not divide the inputs.
    """
    scales, zeros = find_scales(w, bits, group_size, symmetric)
    zeros = zeros.clamp(min=lowest_zero)
    return round_to_codes(w, scales, zeros, bits), scales, zeros


def find_scales(w: torch.Tensor, bits: int, group_size: int, symmetric: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The scale and zero of each group, so that the codes reach from its smallest number to its largest.

    A range always holds 0, so that 0 stays exactly 0. A symmetric one is as wide on both sides; there are 2 ** bits codes
    for it, one fewer above zero than below, so the largest positive number may lose half a step. Scales are rounded to
    the dtype in which they are kept before any code is chosen. As `quantize_groups`.
    """
    check_group_size(w.shape[1], group_size)
    top = 2**bits - 1
    low, high = w.float().unflatten(1, (-1, group_size)).aminmax(dim=2)  # [outputs, groups]
    low, high = low.clamp(max=0), high.clamp(min=0)
    if symmetric:
        high = torch.maximum(high, -low)
        low = -high
    scales = ((high - low) / top).to(w.dtype)
    scales = torch.where(scales > 0, scales, torch.ones_like(scales))  # a group of zeros
    zeros = torch.full_like(low, (top + 1) // 2) if symmetric else (-low / scales.float()).round().clamp(0, top)
    return scales, zeros.to(torch.uint8)


def round_to_codes(w: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, bits: int) -> torch.Tensor:
    """The codes of `w` [outputs, inputs] with these scales and zeros [outputs, groups]: uint8."""
    w, group_size = w.float(), w.shape[1] // scales.shape[1]
    steps = (w / spread(scales.float(), group_size)).round()
    return (steps + spread(zeros, group_size)).clamp(0, 2**bits - 1).to(torch.uint8)


def dequantize_groups(codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor) -> torch.Tensor:
    """(code - zero) * scale: [outputs, inputs] in the scales' dtype, from scales and zeros [outputs, groups].

    The difference is a whole number and exact; only the product is rounded.
    """
    group_size = codes.shape[1] // scales.shape[1]
    steps = codes.to(torch.int16) - spread(zeros, group_size).to(torch.int16)
    return steps.to(scales.dtype) * spread(scales, group_size)


def round_groups(w: torch.Tensor, bits: int, group_size: int) -> torch.Tensor:
    """Return `w` [outputs, inputs] rounded to codes of `bits` bits, with a scale and a zero for each group."""
    return dequantize_groups(*quantize_groups(w, bits, group_size, symmetric=False))


def spread(per_group: torch.Tensor, group_size: int) -> torch.Tensor:
    """Repeat the number of each group for each of its inputs: [outputs, groups] -> [outputs, inputs]."""
    return per_group.repeat_interleave(group_size, dim=1)


def check_group_size(inputs: int, group_size: int) -> None:
    """Raise ValueError unless groups of this size fill a row of weights."""
    if group_size < 1 or inputs % group_size:
        raise ValueError(f"groups of {group_size} do not divide {inputs} inputs: choose a size that does")
