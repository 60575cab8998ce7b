"""Products of FP8 with FP8: activations become codes too, with a scale for each token, or for each 128 inputs of a token."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from folovllm.electives.quantization.weight import QuantizedWeight
from folovllm.kernels.fp8_cache import LARGEST, to_cache
from folovllm.kernels.pdl import available, let_next_start, wait_for_inputs

MULTIPLE = 16  # of tokens that the library multiplies: the others are zeros


@triton.jit(do_not_specialize=["num_tokens"])
def quantize_rows_kernel(
    x_ptr, columns_ptr, code_ptr, scale_ptr, stride_x, num_tokens, eps, K: tl.constexpr, GROUP: tl.constexpr,
    WIDTH: tl.constexpr, NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program p: token p, zeros behind the last. Scales of a group lie together; that of nothing but zeros is one.

    NORM: scales are divided by the root mean square of the token's `x`, so that codes times scales are the normed `x`.
    """
    let_next_start(PDL)
    wait_for_inputs(PDL)
    token, k = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
    inside = (k < K) & (token < num_tokens)
    x = tl.load(x_ptr + token * stride_x + k, mask=inside, other=0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(x * x, 0) / K + eps) if NORM else 1.0
    if columns_ptr is not None:
        x *= tl.load(columns_ptr + k, mask=inside, other=0).to(tl.float32)
    SIZE: tl.constexpr = WIDTH if GROUP == K else GROUP
    group = tl.arange(0, WIDTH // SIZE)
    x = tl.reshape(x, [WIDTH // SIZE, SIZE])
    largest = tl.max(tl.abs(x), 1)
    scale = tl.where(largest > 0, largest / LARGEST, 1.0)
    at = group[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    tl.store(code_ptr + token * K + at, to_cache(x, (1 / scale)[:, None], code_ptr), mask=at < K)
    tl.store(scale_ptr + group.to(tl.int64) * tl.num_programs(0) + token, scale * inverse, mask=group * SIZE < K)


def quantize_rows(
    x: torch.Tensor, group: int | None = None, columns: torch.Tensor | None = None, norm_eps: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`x` [T, K], times `columns` [K], as codes of E4M3 and float32 scales: code * scale is about x.

    The largest of a row, or of each `group` of its inputs, a divisor of K, becomes the largest code. So codes of a token
    depend on that token alone. Codes are [R, K], where R is T rounded up to MULTIPLE; scales [R, 1], or [R, K / group], of
    which those of a group lie together.
    """
    num_tokens, width = x.shape
    rows = triton.cdiv(num_tokens, MULTIPLE) * MULTIPLE
    codes = x.new_empty(rows, width, dtype=torch.float8_e4m3fn)
    scales = x.new_empty(width // (group or width), rows, dtype=torch.float32)
    pdl = available(x.device)
    quantize_rows_kernel[(rows,)](
        x, columns, codes, scales, x.stride(0), num_tokens, norm_eps or 0.0, K=width, GROUP=group or width,
        WIDTH=triton.next_power_of_2(width), NORM=norm_eps is not None, PDL=pdl, num_warps=4 if width <= 4096 else 8,
        **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip
    return codes, scales.t() if group else scales.view(rows, 1)


def serves(weight: QuantizedWeight) -> bool:
    """Whether the library multiplies such weights by activations in FP8.

    Blocks only on Hopper and from CUDA 12.9 on; it reads their scales in fours along the inputs.
    """
    outputs, inputs = weight.weight.shape
    capability = torch.cuda.get_device_capability(weight.weight.device)
    if weight.columns >= inputs and weight.rows == 1:
        return capability >= (8, 9) and outputs % 16 == inputs % 16 == 0
    cuda = tuple(int(part) for part in (torch.version.cuda or "0").split("."))
    has_blocks = capability == (9, 0) and cuda >= (12, 9)
    return has_blocks and (weight.rows, weight.columns) == (128, 128) and outputs % 128 == inputs % 512 == 0


def fp8_matmul(x: torch.Tensor, weight: QuantizedWeight, columns: torch.Tensor | None = None) -> torch.Tensor:
    """`x` [T, inputs] in bfloat16, times `columns`, in FP8, times the transpose of W. Where `serves` says so.

    The tensor cores' own sums of FP8 keep too few bits for long rows: they are added up outside (`use_fast_accum`).
    """
    group = weight.columns if weight.columns < x.shape[1] else None
    x_codes, scales = quantize_rows(x, group, columns)
    scale = weight.scale.t() if weight.scale.shape[1] > 1 else weight.scale.view(1, -1)
    y = torch._scaled_mm(x_codes, weight.weight.t(), scales, scale, out_dtype=x.dtype, use_fast_accum=False)
    return y[: len(x)]
