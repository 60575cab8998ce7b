"""One Triton kernel that calls another."""

import torch
import triton
import triton.language as tl


@triton.jit
def double(x):
    """Twice x."""
    return x + x


@triton.jit
def _doubled(source, out, size: tl.constexpr):
    offsets = tl.arange(0, size)
    tl.store(out + offsets, double(tl.load(source + offsets)))


def doubled(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    _doubled[(1,)](x, out, x.numel())
    return out
