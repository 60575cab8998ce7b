"""Products of FP8 with FP8: activations become codes too, with a scale for each token, or for each 128 inputs of a token."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from folovllm.kernels.fp8_cache import INTERPRETED, LARGEST, ROUNDING, SMALLEST_NORMAL
from folovllm.kernels.pdl import available, let_next_start, wait_for_inputs
from folovllm.kernels.skinny_linear import silu_product

PER_WARP = 512  # numbers of a row
MULTIPLE = 16  # of tokens that the library multiplies: the others are zeros


@triton.jit
def to_e4m3(x):
    """Return float32 numbers of at most 448 as codes, rounded half to even. (The cast of Triton's interpreter is wrong where a
    mantissa overflows, so there arithmetic has rounded before: `fp8_cache.to_cache`.)"""
    if INTERPRETED:
        power = (x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        magic = tl.maximum(power, SMALLEST_NORMAL) * ROUNDING
        x = (x + magic) - magic
    return x.to(tl.float8e4nv)


@triton.jit
def factors_of(largest):
    """Return the scale of a row or group whose largest magnitude is given, and what its numbers are multiplied by to be codes."""
    largest = tl.where(largest > 0, largest, LARGEST)
    return largest / LARGEST, tl.full(largest.shape, LARGEST, tl.float32) / largest


@triton.jit(do_not_specialize=["num_tokens"])
def quantize_rows_kernel(
    x_ptr, columns_ptr, static_ptr, code_ptr, scale_ptr, stride_x, num_tokens, eps, K: tl.constexpr, GROUP: tl.constexpr,
    WIDTH: tl.constexpr, NORM: tl.constexpr, GATED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program p: token p, zeros behind the last. Scales of a group lie together; that of nothing but zeros is one.

    NORM: scales are divided by the root mean square of the token's `x`, so that codes times scales are the normed `x`.
    GATED: a row is gate [K] and up [K], and silu(gate) * up is rounded. `static_ptr`: where the scale is, if it is known.
    """
    let_next_start(PDL)
    wait_for_inputs(PDL)
    token, k = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
    inside = (k < K) & (token < num_tokens)
    x = tl.load(x_ptr + token * stride_x + k, mask=inside, other=0)
    if GATED:
        up = tl.load(x_ptr + token * stride_x + K + k, mask=inside, other=0)
        x = silu_product(x, up, x.dtype).to(x.dtype)
    x = x.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(x * x, 0) / K + eps) if NORM else 1.0
    if columns_ptr is not None:  # rounded, as everywhere
        x = (x * tl.load(columns_ptr + k, mask=inside, other=0)).to(x_ptr.dtype.element_ty).to(tl.float32)
    SIZE: tl.constexpr = WIDTH if GROUP == K else GROUP
    group = tl.arange(0, WIDTH // SIZE)
    x = tl.reshape(x, [WIDTH // SIZE, SIZE])
    scale, factor = factors_of(tl.max(tl.abs(x), 1))
    if static_ptr is not None:
        static = tl.load(static_ptr)
        x = tl.minimum(tl.maximum(x * (inverse / static), -LARGEST), LARGEST)
        scale, factor, inverse = scale * 0 + static, factor * 0 + 1, 1.0
    at = group[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    tl.store(code_ptr + token * K + at, to_e4m3(x * factor[:, None]), mask=at < K)
    tl.store(scale_ptr + group.to(tl.int64) * tl.num_programs(0) + token, scale * inverse, mask=group * SIZE < K)


def quantize_rows(
    x: torch.Tensor,
    group: int | None = None,
    columns: torch.Tensor | None = None,
    norm_eps: float | None = None,
    static: torch.Tensor | None = None,
    gated: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `x` [T, K], times `columns` [K], as codes of E4M3 and float32 scales: code * scale is about x.

    The largest of a row, or of each `group` of its inputs, a divisor of K, becomes the largest code. So codes of a token
    depend on that token alone. Codes are [R, K], where R is T rounded up to MULTIPLE; scales [R, 1], or [R, K / group], of
    which those of a group lie together.

    Args:
        norm_eps: code * scale is `x` divided by its root mean square (RMSNorm without its weight), times `columns`.
        static: a scale for all rows, [1] or more of the same. Numbers that are too large become the largest code.
        gated: `x` is gate and up, [T, 2K]; silu(gate) * up is rounded, which is the input of the next product.
    """
    num_tokens, width = x.shape
    width = width // 2 if gated else width
    rows = triton.cdiv(num_tokens, MULTIPLE) * MULTIPLE
    codes = x.new_empty(rows, width, dtype=torch.float8_e4m3fn)
    scales = x.new_empty(width // (group or width), rows, dtype=torch.float32)
    pdl = available(x.device)
    quantize_rows_kernel[(rows,)](
        x, columns, static, codes, scales, x.stride(0), num_tokens, norm_eps or 0.0, K=width, GROUP=group or width,
        WIDTH=triton.next_power_of_2(width), NORM=norm_eps is not None, GATED=gated, PDL=pdl,
        num_warps=min(16, max(1, triton.next_power_of_2(width) // PER_WARP)),
        **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip
    return codes, scales.t() if group else scales.view(rows, 1)
