"""FP8 times FP8 on the tensor cores: codes of E4M3 on both sides, and a scale for each token and each output, or block of them.

Few tokens read all weights, so this is a race of bytes: nothing is unpacked, and programs share the inputs of a tile where
there are few tiles (`split_sum`). A scale meets sums: of the whole row where that has one, of a tile of inputs where each block
has its own. For many tokens the library multiplies (`torch._scaled_mm`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from folovllm.electives.quantization.weight import QuantizedWeight
from folovllm.kernels.multiprocessors import num_sms
from folovllm.kernels.pdl import available, let_next_start, wait_for_inputs
from folovllm.kernels.skinny_linear import append
from folovllm.kernels.split_sum import counters, num_parts, parts_for, store_sum, token_tiles

PER_SM = 2  # programs that should be on each multiprocessor
MANY, MANY_IN_BLOCKS = 129, 65  # tokens, from which on the library is faster
MANY_ROWS = 16_384  # outputs that keep a GPU busy without shared tiles


@triton.jit
def add_tile(acc, x_ptr, weight_ptr, scales, K: tl.constexpr, BK: tl.constexpr, k):
    """`acc` and the products of BK inputs from `k` on, times `scales` where they have their own."""
    at = k + tl.arange(0, BK)
    if K % BK == 0:
        weights, x = tl.load(weight_ptr + at[None, :]), tl.load(x_ptr + at[:, None])
    else:
        weights = tl.load(weight_ptr + at[None, :], mask=at[None, :] < K, other=0.0)
        x = tl.load(x_ptr + at[:, None], mask=at[:, None] < K, other=0.0)
    return acc + tl.dot(weights, x) * scales


@triton.jit(do_not_specialize=["num_tokens", "num_parts", "stride_scale"])
def fp8_linear_kernel(
    x_ptr, x_scale_ptr, weight_ptr, scale_ptr, residual_ptr, part_ptr, done_ptr, out_ptr, stride_scale, num_tokens, num_parts,
    OUTPUTS: tl.constexpr, K: tl.constexpr, GROUP_ROWS: tl.constexpr, GROUP: tl.constexpr, RESIDUAL: tl.constexpr,
    SPLIT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, TIMES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Multiply inputs and weights in FP8; scales are applied at the end, or after each group where weights have blocks.

    Program (q, p, s): outputs p * BN to p * BN + BN of tokens q * BM to q * BM + BM; SPLIT: of every num_parts-th step
    of inputs, from s on. A step has TIMES tiles of BK inputs, each within a group; so the scales of several are waited for at
    once. Scales of `x` are [K / GROUP, tokens], `stride_scale` apart.
    """
    let_next_start(PDL)
    outputs = tl.program_id(1) * BN + tl.arange(0, BN)
    tokens = tl.program_id(0) * BM + tl.arange(0, BM)
    rows = tl.minimum(outputs, OUTPUTS - 1).to(tl.int64)[:, None]
    token = tl.minimum(tokens, num_tokens - 1)[None, :].to(tl.int64)
    # One row of blocks has all outputs of a tile, or not.
    blocks = tl.program_id(1) * BN // GROUP_ROWS if GROUP_ROWS % BN == 0 else rows // GROUP_ROWS
    acc = tl.zeros([BN, BM], tl.float32)
    first, step = (tl.program_id(2), num_parts) if SPLIT else (0, 1)
    wait_for_inputs(PDL)
    for number in range(first, tl.cdiv(K, BK * TIMES), step):
        scales = ()
        for i in tl.static_range(TIMES if GROUP < K else 0):
            group = (number * TIMES + i) * BK // GROUP
            of_rows = tl.load(scale_ptr + blocks * (K // GROUP) + group)
            scales = append(scales, of_rows * tl.load(x_scale_ptr + group * stride_scale + token))
        for i in tl.static_range(TIMES):
            acc = add_tile(
                acc, x_ptr + token * K, weight_ptr + rows * K, scales[i] if GROUP < K else 1.0, K, BK,
                (number * TIMES + i) * BK)  # fmt: skip
    if GROUP == K:
        acc *= tl.load(scale_ptr + blocks) * tl.load(x_scale_ptr + token)
    store_sum(acc, part_ptr, done_ptr, residual_ptr, out_ptr, num_tokens, num_parts, OUTPUTS, SPLIT, RESIDUAL)


def tile_for(num_tokens: int, rows: int, width: int, group: int) -> dict[str, int]:
    """Return tokens, outputs and inputs of a program's tile, its warps, and how many tiles are on their way.

    What was fastest on an H200 (`docs/performance_log.md`), within 99 KiB of shared memory. A tile lies within a group.
    """
    m, is_busy = min(128, max(16, triton.next_power_of_2(num_tokens))), rows >= MANY_ROWS
    k, times, stages = (256, 1, 4) if m < 64 else (256, 1, 3) if m == 64 and not is_busy else (128, 1, 4)
    if group < width:
        k, times, stages = group & -group, (4 if m < 64 else 2 if m == 64 else 1), (2 if m < 64 or is_busy else 3)
        times = times if width % (times * k) == 0 else 1
    return {
        "BM": m, "BN": 64, "BK": min(k, triton.next_power_of_2(width)), "TIMES": times, "num_warps": 4, "num_stages": stages
    }  # fmt: skip


def fp8_linear(
    codes: torch.Tensor,
    scales: torch.Tensor,
    weight: QuantizedWeight,
    out: torch.Tensor,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """Codes [R, K] with scales as `quantize_rows` gives them, times the transpose of W: the first rows, `out` [T, outputs].

    `residual` [T, outputs] is added. Sums of a tile of inputs are the tensor cores', those of tiles are float32.
    """
    num_tokens, (rows, width) = len(out), weight.weight.shape
    tile = tile_for(num_tokens, rows, width, weight.columns)
    row_tiles, most = triton.cdiv(rows, tile["BN"]), max(1, width // (2 * tile["BK"] * tile["TIMES"]))
    parts = num_parts(row_tiles * token_tiles(num_tokens, tile["BM"]), PER_SM * num_sms(codes.device), most)
    pdl = available(codes.device)
    fp8_linear_kernel[(triton.cdiv(num_tokens, tile["BM"]), row_tiles, parts)](
        codes, scales, weight.weight, weight.scale, out if residual is None else residual, parts_for(out, out, parts),
        counters(codes.device), out, scales.stride(1), num_tokens, parts, OUTPUTS=rows, K=width, GROUP_ROWS=weight.rows,
        GROUP=min(weight.columns, width), RESIDUAL=residual is not None, SPLIT=parts > 1, PDL=pdl,
        **({"launch_pdl": True} if pdl else {}), **tile,
    )  # fmt: skip
    return out


def fp8_product(
    codes: torch.Tensor,
    scales: torch.Tensor,
    weight: QuantizedWeight,
    num_tokens: int,
    dtype: torch.dtype,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """The product [num_tokens, outputs] in `dtype`; added to `residual`, which may be written over, where there is one.

    For many tokens it is the library's, whose own sums of FP8 (`use_fast_accum`) keep fewer bits than float32: the product is
    off by 0.2 to 0.3% instead of 0.17%, which is what rounding it to bfloat16 costs, and takes 0.8 of the time.
    """
    in_blocks = weight.scale.shape[1] > 1
    is_few = num_tokens < (MANY_IN_BLOCKS if in_blocks else MANY)
    if is_few or dtype != torch.bfloat16 or not is_supported(weight):
        return fp8_linear(codes, scales, weight, codes.new_empty(num_tokens, len(weight.weight), dtype=dtype), residual)
    scale = weight.scale.t() if in_blocks else weight.scale.view(1, -1)
    y = torch._scaled_mm(
        codes, weight.weight.t(), scales, scale, out_dtype=dtype, use_fast_accum=not in_blocks
    )[:num_tokens]  # fmt: skip
    return y if residual is None else residual.add_(y)


def is_supported(weight: QuantizedWeight) -> bool:
    """Whether the library multiplies such weights by activations in FP8.

    Blocks only on Hopper and from CUDA 12.9 on; it reads their scales in fours along the inputs.
    """
    outputs, inputs = weight.weight.shape
    if weight.columns >= inputs and weight.rows == 1:
        return outputs % 16 == inputs % 16 == 0
    cuda = tuple(int(part) for part in (torch.version.cuda or "0").split("."))
    has_blocks = torch.cuda.get_device_capability(weight.weight.device) == (9, 0) and cuda >= (12, 9)
    return has_blocks and (weight.rows, weight.columns) == (128, 128) and outputs % 128 == inputs % 512 == 0
