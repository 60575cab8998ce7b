"""FP8 times FP8 on the tensor cores: codes of E4M3 on both sides, and a scale for each token and each output, or block of them.

Few tokens read all weights, so this is a race of bytes: nothing is unpacked, and programs share the inputs of a tile where
there are few tiles (`split_sum`). A scale meets sums: of the whole row where that has one, of a tile of inputs where each block
has its own. For many tokens the library multiplies (`torch._scaled_mm`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from folovllm.electives.quantization.weight import QuantizedWeight
from folovllm.kernels.pdl import available, let_next_start, wait_for_inputs
from folovllm.kernels.split_sum import counters, num_parts, parts_for, store_sum, token_tiles
from folovllm.kernels.variants import capability_of, num_sms

MANY, MANY_IN_BLOCKS = 129, 65  # tokens, from which on the library is faster


@triton.jit
def load_tile(place, first, row, k, K: tl.constexpr, FETCHED: tl.constexpr, SIZE: tl.constexpr, BK: tl.constexpr):
    """BK codes of SIZE rows, [SIZE, BK], from input `k` on: from row `first` of a descriptor on, or of the rows [SIZE, 1] of a
    matrix [rows, K].
    """
    at = k + tl.arange(0, BK)[None, :]
    if FETCHED:
        tile = place.load([first, k])
    elif K % BK == 0:
        tile = tl.load(place + row * K + at)
    else:
        tile = tl.load(place + row * K + at, mask=at < K, other=0.0)
    return tile


@triton.jit(do_not_specialize=["num_tokens", "num_parts", "stride_scale"])
def fp8_linear_kernel(
    x_place, x_scale_ptr, weight_place, scale_ptr, residual_ptr, part_ptr, done_ptr, out_ptr, stride_scale, num_tokens, num_parts,
    OUTPUTS: tl.constexpr, K: tl.constexpr, GROUP_ROWS: tl.constexpr, GROUP: tl.constexpr, RESIDUAL: tl.constexpr,
    FETCHED: tl.constexpr, SPLIT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Multiply inputs and weights in FP8; scales are applied at the end, or after each group where weights have blocks.

    Program (q, p, s): outputs p * BN to p * BN + BN of tokens q * BM to q * BM + BM; SPLIT: part s of num_parts of the tiles of BK
    inputs, each within a group. FETCHED: both places are descriptors, from which the copy engine fetches tiles (TMA); else
    pointers. Scales of `x` are [K / GROUP, tokens], `stride_scale` apart; those of the next tile are asked for ahead of time.
    """
    let_next_start(PDL)
    first_row, first_token = tl.program_id(1) * BN, tl.program_id(0) * BM
    rows = tl.minimum(first_row + tl.arange(0, BN), OUTPUTS - 1).to(tl.int64)[:, None]
    token = tl.minimum(first_token + tl.arange(0, BM), num_tokens - 1).to(tl.int64)[None, :]
    # One row of blocks has all outputs of a tile, or not.
    blocks = first_row // GROUP_ROWS if GROUP_ROWS % BN == 0 else rows // GROUP_ROWS
    scale_ptr, x_scale_ptr = scale_ptr + blocks * tl.cdiv(K, GROUP), x_scale_ptr + token
    acc, TILES = tl.zeros([BN, BM], tl.float32), tl.cdiv(K, BK)
    first, end = 0, TILES
    if SPLIT:
        first, end = tl.program_id(2) * TILES // num_parts, (tl.program_id(2) + 1) * TILES // num_parts
    group = first * BK // GROUP
    of_rows = tl.load(scale_ptr + group)
    wait_for_inputs(PDL)
    of_tokens = tl.load(x_scale_ptr + group * stride_scale)
    for tile in range(first, end):
        weights = load_tile(weight_place, first_row, rows, tile * BK, K, FETCHED, BN, BK)
        x = load_tile(x_place, first_token, token.T, tile * BK, K, FETCHED, BM, BK).T
        if GROUP < K:
            scale, group = of_rows * of_tokens, tl.minimum(tile + 1, TILES - 1) * BK // GROUP
            of_rows, of_tokens = tl.load(scale_ptr + group), tl.load(x_scale_ptr + group * stride_scale)
            acc += tl.dot(weights, x) * scale
        else:
            acc += tl.dot(weights, x) * 1.0  # not in the accumulator of the tensor cores, which has fewer bits
    if GROUP == K:
        acc *= of_rows * of_tokens
    store_sum(acc, part_ptr, done_ptr, residual_ptr, out_ptr, num_tokens, num_parts, OUTPUTS, SPLIT, RESIDUAL)


def kernel_config(num_tokens: int, rows: int, width: int, group: int, fetched: bool) -> dict[str, int]:
    """Return tokens, outputs and inputs of a program's tile, its warps, how many tiles are on their way, and programs that a
    multiprocessor should have.

    What was fastest on an H200 (`docs/performance_log.md`); elsewhere within 99 KiB of shared memory. A tile lies within a group.
    """
    m = min(128, max(16, triton.next_power_of_2(num_tokens)))
    if group < width:
        k, stages, per_sm = min(256, group & -group), (6 if m < 64 else 4), 3
    else:
        k, stages, per_sm = min(256, triton.next_power_of_2(width)), 4, (2 if m < 64 else 1)
    if not fetched and m >= 64:
        k, stages, per_sm = min(128, k), 3, 2
    return {"BM": m, "BN": 64, "BK": k, "num_warps": 4, "num_stages": stages, "per_sm": per_sm}


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
    num_tokens, (rows, width), fetched = len(out), weight.weight.shape, capability_of(codes.device) >= 90
    tile = kernel_config(num_tokens, rows, width, weight.columns, fetched)
    row_tiles, programs = triton.cdiv(rows, tile["BN"]), tile.pop("per_sm") * num_sms(codes.device)
    most = max(1, width // (2 * tile["BK"]))
    parts = num_parts(row_tiles * token_tiles(num_tokens, tile["BM"]), programs, most)
    places = codes, weight.weight
    if fetched:
        places = tuple(
            TensorDescriptor.from_tensor(place, [tile[side], tile["BK"]])
            for place, side in zip(places, ("BM", "BN"), strict=True)
        )
    pdl = available(codes.device)
    fp8_linear_kernel[(triton.cdiv(num_tokens, tile["BM"]), row_tiles, parts)](
        places[0], scales, places[1], weight.scale, out if residual is None else residual, parts_for(out, out, parts),
        counters(codes.device), out, scales.stride(1), num_tokens, parts, OUTPUTS=rows, K=width, GROUP_ROWS=weight.rows,
        GROUP=min(weight.columns, width), RESIDUAL=residual is not None, FETCHED=fetched, SPLIT=parts > 1, PDL=pdl,
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
    """Return the product [num_tokens, outputs] in `dtype`; added to `residual`, which may be written over, where there is one.

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
    """Return whether the library multiplies such weights by activations in FP8.

    Blocks only on Hopper and from CUDA 12.9 on; it reads their scales in fours along the inputs.
    """
    outputs, inputs = weight.weight.shape
    if weight.columns >= inputs and weight.rows == 1:
        return outputs % 16 == inputs % 16 == 0
    cuda = tuple(int(part) for part in (torch.version.cuda or "0").split("."))
    has_blocks = torch.cuda.get_device_capability(weight.weight.device) == (9, 0) and cuda >= (12, 9)
    return has_blocks and (weight.rows, weight.columns) == (128, 128) and outputs % 128 == inputs % 512 == 0
