"""Activations as codes of FP8, for products of FP8 with FP8: a scale for each token, or for each 128 inputs of a token."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from folovllm.kernels.fp8 import LARGEST, to_cache


@triton.jit(do_not_specialize=["num_tokens"])
def quantize_rows_kernel(
    x_ptr, columns_ptr, code_ptr, scale_ptr, stride_x, num_tokens, K: tl.constexpr, GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Program p: token p. Scales of a group lie together: [K / GROUP, num_tokens]. A row of zeros has a scale of one."""
    token, k = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
    x = tl.load(x_ptr + token * stride_x + k, mask=k < K, other=0).to(tl.float32)
    if columns_ptr is not None:
        x *= tl.load(columns_ptr + k, mask=k < K, other=0).to(tl.float32)
    SIZE: tl.constexpr = WIDTH if GROUP == K else GROUP
    x = tl.reshape(x, [WIDTH // SIZE, SIZE])
    largest = tl.max(tl.abs(x), 1)
    scale = tl.where(largest > 0, largest / LARGEST, 1.0)
    at = tl.arange(0, WIDTH // SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    tl.store(code_ptr + token * K + at, to_cache(x, (1 / scale)[:, None], code_ptr), mask=at < K)
    group = tl.arange(0, WIDTH // SIZE)
    tl.store(scale_ptr + group.to(tl.int64) * num_tokens + token, scale, mask=group * SIZE < K)


def quantize_rows(
    x: torch.Tensor, group: int | None = None, columns: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`x` [T, K], times `columns` [K], as codes of E4M3 [T, K] and float32 scales: code * scale is about x.

    The largest of a row, or of each `group` of its inputs, becomes the largest code. So codes of a token depend on that
    token alone, and a factor of its whole row changes its scale, and no code. Scales are [T, 1], or [T, K / group], of which
    those of a group lie together.
    """
    num_tokens, width = x.shape
    codes = x.new_empty(num_tokens, width, dtype=torch.float8_e4m3fn)
    scales = x.new_empty(width // (group or width), num_tokens, dtype=torch.float32)
    quantize_rows_kernel[(num_tokens,)](
        x, columns, codes, scales, x.stride(0), num_tokens, K=width, GROUP=group or width,
        WIDTH=triton.next_power_of_2(width), num_warps=4 if width <= 4096 else 8,
    )  # fmt: skip
    return codes, scales.t() if group else scales.view(num_tokens, 1)
