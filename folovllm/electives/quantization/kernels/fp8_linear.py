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
from folovllm.kernels.split_sum import counters, num_parts, parts_for, store_sum, token_tiles

MANY = 129  # tokens, from which on the library is faster
MANY_ROWS = 16_384  # outputs that keep a GPU busy without shared tiles


@triton.jit
def block_scales(
    x_scale_ptr, scale_ptr, stride_scale, rows, token, tile, K: tl.constexpr, GROUP: tl.constexpr, BK: tl.constexpr
):  # fmt: skip
    """The scales of a tile of inputs: of some `rows` of blocks times those of `token` [1, BM]. Past the last tile its own."""
    group = tl.minimum(tile * BK // GROUP, K // GROUP - 1)
    return tl.load(scale_ptr + rows * (K // GROUP) + group) * tl.load(x_scale_ptr + group * stride_scale + token)


@triton.jit
def ask_early(weight_ptr, rows, first, step, K: tl.constexpr, BK: tl.constexpr, NUM: tl.constexpr):
    """Ask the L2 cache for the first tiles of weights, while `x` is still being made."""
    line = tl.arange(0, BK // 128)[None, :] * 128
    for i in tl.static_range(NUM):
        at = tl.minimum((first + i * step) * BK, K - BK)
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [(weight_ptr + rows * K + at + line).to(tl.int64)], tl.int32,
            False, 1)  # fmt: skip


@triton.jit(do_not_specialize=["num_tokens", "num_parts", "stride_scale"])
def fp8_linear_kernel(
    x_ptr, x_scale_ptr, weight_ptr, scale_ptr, residual_ptr, part_ptr, done_ptr, out_ptr, stride_scale, num_tokens, num_parts,
    OUTPUTS: tl.constexpr, K: tl.constexpr, GROUP_ROWS: tl.constexpr, GROUP: tl.constexpr, RESIDUAL: tl.constexpr,
    SPLIT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (p, q, s): outputs p * BN to p * BN + BN of tokens q * BM to q * BM + BM; SPLIT: of every num_parts-th tile
    of BK inputs, from s on. A tile lies within a group. Scales of `x` are [K / GROUP, tokens], `stride_scale` apart.
    """
    let_next_start(PDL)
    outputs = tl.program_id(0) * BN + tl.arange(0, BN)
    tokens = tl.program_id(1) * BM + tl.arange(0, BM)
    rows = tl.minimum(outputs, OUTPUTS - 1).to(tl.int64)[:, None]
    token = tl.minimum(tokens, num_tokens - 1)[None, :].to(tl.int64)
    acc = tl.zeros([BN, BM], tl.float32)
    k = tl.arange(0, BK)
    first, step = (tl.program_id(2), num_parts) if SPLIT else (0, 1)
    if PDL and BK >= 128:
        ask_early(weight_ptr, rows, first, step, K, BK, AHEAD)
    wait_for_inputs(PDL)
    if GROUP < K:  # one row of blocks has all outputs of a tile, or not
        blocks = tl.program_id(0) * BN // GROUP_ROWS if GROUP_ROWS % BN == 0 else rows // GROUP_ROWS
        factor = block_scales(x_scale_ptr, scale_ptr, stride_scale, blocks, token, first, K, GROUP, BK)
    for tile in range(first, tl.cdiv(K, BK), step):
        at = tile * BK + k
        if K % BK == 0:
            weights = tl.load(weight_ptr + rows * K + at[None, :])
            x = tl.load(x_ptr + token * K + at[:, None])
        else:
            weights = tl.load(weight_ptr + rows * K + at[None, :], mask=at[None, :] < K, other=0.0)
            x = tl.load(x_ptr + token * K + at[:, None], mask=at[:, None] < K, other=0.0)
        if GROUP < K:  # the next tile's scales are on their way while this one is multiplied
            now, factor = factor, block_scales(
                x_scale_ptr, scale_ptr, stride_scale, blocks, token, tile + step, K, GROUP, BK)  # fmt: skip
            acc += tl.dot(weights, x) * now
        else:
            acc += tl.dot(weights, x)
    if GROUP == K:
        acc *= tl.load(scale_ptr + rows // GROUP_ROWS) * tl.load(x_scale_ptr + token)
    store_sum(acc, part_ptr, done_ptr, residual_ptr, out_ptr, num_tokens, num_parts, OUTPUTS, SPLIT, RESIDUAL)


def tile_for(num_tokens: int, rows: int, width: int, group: int) -> dict[str, int]:
    """Return tokens, outputs and inputs of a program's tile, its warps, and how many tiles are on their way.

    What was fastest on an H200 (`docs/performance_log.md`), within 99 KiB of shared memory. A tile lies within a group.
    """
    m = min(128, max(16, triton.next_power_of_2(num_tokens)))
    k = 256 if m < 64 or (m == 64 and rows < MANY_ROWS) else 128
    stages = 3 if m == 64 and k == 256 else 4
    within = group & -group if group < width else triton.next_power_of_2(width)
    return {"BM": m, "BN": 64, "BK": min(k, within), "num_warps": 4, "num_stages": stages, "AHEAD": stages}


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
    row_tiles, most = triton.cdiv(rows, tile["BN"]), max(1, width // (2 * tile["BK"]))
    parts = num_parts(row_tiles * token_tiles(num_tokens, tile["BM"]), 2 * num_sms(codes.device), most)
    pdl = available(codes.device)
    fp8_linear_kernel[(row_tiles, triton.cdiv(num_tokens, tile["BM"]), parts)](
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
    if num_tokens < MANY or dtype != torch.bfloat16 or not is_supported(weight):
        return fp8_linear(codes, scales, weight, codes.new_empty(num_tokens, len(weight.weight), dtype=dtype), residual)
    in_blocks = weight.scale.shape[1] > 1
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
