"""Rounding to 8 bits: each number to the nearest that its scale can express. No calibration, and hardly an error.

Scales are chosen by the largest absolute value that shares them, and kept in the dtype that is given.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

FP8 = torch.float8_e4m3fn
LARGEST = {torch.int8: 127.0, FP8: torch.finfo(FP8).max}


def round_channels(w: torch.Tensor, to: torch.dtype, scale_dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Round `w` [outputs, inputs] with a scale for each output.

    Args:
        to: torch.int8 (127 steps on both sides of 0) or torch.float8_e4m3fn (the largest is 448).

    Returns:
        codes [outputs, inputs] in `to`; scales [outputs, 1]. A weight is code * scale.
    """
    scale = scale_for(w.float().abs().amax(dim=1, keepdim=True), to).to(scale_dtype)
    return encode(w.float() / scale.float(), to), scale


def round_blocks(w: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Round `w` [outputs, inputs] to FP8 with a scale for each block of `size` x `size`; those at the edges are smaller.

    Returns:
        codes [outputs, inputs]; scales [output blocks, input blocks] float32. DeepSeek's checkpoints and Qwen's call such a
        scale `weight_scale_inv`, though a weight is code * scale here too.
    """
    rows, columns = (-(-n // size) for n in w.shape)
    padded = F.pad(w.float().abs(), (0, columns * size - w.shape[1], 0, rows * size - w.shape[0]))
    scale = scale_for(padded.view(rows, size, columns, size).amax(dim=(1, 3)), FP8)
    return encode(w.float() / spread_blocks(scale, w.shape, size), FP8), scale


def spread_blocks(scale: torch.Tensor, shape: torch.Size, size: int) -> torch.Tensor:
    """A block's scale for each of its numbers: [output blocks, input blocks] -> [outputs, inputs]."""
    return scale.repeat_interleave(size, dim=0).repeat_interleave(size, dim=1)[: shape[0], : shape[1]]


def scale_for(largest: torch.Tensor, to: torch.dtype) -> torch.Tensor:
    """The scale that brings `largest` to the largest number of `to`; 1 where all are 0."""
    return torch.where(largest > 0, largest / LARGEST[to], 1.0)


def encode(x: torch.Tensor, to: torch.dtype) -> torch.Tensor:
    """The nearest number of 8 bits, half to even; what is too large becomes the largest."""
    x = x.clamp(-LARGEST[to], LARGEST[to])
    return (x.round() if to == torch.int8 else x).to(to)
