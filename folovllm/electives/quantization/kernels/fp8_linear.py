"""FP8 times FP8 on the tensor cores: codes of E4M3 on both sides, and a scale for each token and each output, or block of them.

Few tokens read all weights, so this is a race of bytes: nothing is unpacked, and programs share the inputs of a tile where
there are few tiles (`split_sum`). A scale meets sums: of the whole row where that has one, of a tile of inputs where each block
has its own. For many tokens the library multiplies (`fp8_matmul`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from folovllm.electives.quantization.weight import QuantizedWeight
from folovllm.kernels.multiprocessors import num_sms
from folovllm.kernels.pdl import available, let_next_start, wait_for_inputs
from folovllm.kernels.split_sum import counters, num_parts, parts_for, store_sum, token_tiles


@triton.jit(do_not_specialize=["num_tokens", "num_parts", "stride_scale"])
def fp8_linear_kernel(
    x_ptr, x_scale_ptr, weight_ptr, scale_ptr, residual_ptr, part_ptr, done_ptr, out_ptr, stride_scale, num_tokens, num_parts,
    OUTPUTS: tl.constexpr, K: tl.constexpr, GROUP_ROWS: tl.constexpr, GROUP: tl.constexpr, RESIDUAL: tl.constexpr,
    SPLIT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, FAST: tl.constexpr, PDL: tl.constexpr,
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
    wait_for_inputs(PDL)
    for tile in range(first, tl.cdiv(K, BK), step):
        at = tile * BK + k
        if K % BK == 0:
            weights = tl.load(weight_ptr + rows * K + at[None, :])
            x = tl.load(x_ptr + token * K + at[:, None])
        else:
            weights = tl.load(weight_ptr + rows * K + at[None, :], mask=at[None, :] < K, other=0.0)
            x = tl.load(x_ptr + token * K + at[:, None], mask=at[:, None] < K, other=0.0)
        if GROUP < K:
            group = tile * BK // GROUP
            scale = tl.load(scale_ptr + rows // GROUP_ROWS * tl.cdiv(K, GROUP) + group)
            acc += tl.dot(weights, x) * scale * tl.load(x_scale_ptr + group.to(tl.int64) * stride_scale + token)
        elif FAST:
            acc = tl.dot(weights, x, acc)
        else:
            acc += tl.dot(weights, x)
    if GROUP == K:
        acc *= tl.load(scale_ptr + rows // GROUP_ROWS) * tl.load(x_scale_ptr + token)
    store_sum(acc, part_ptr, done_ptr, residual_ptr, out_ptr, num_tokens, num_parts, OUTPUTS, SPLIT, RESIDUAL)


def tile_for(num_tokens: int, width: int, group: int) -> dict[str, int]:
    """Return tokens, outputs and inputs of a program's tile, its warps, the tiles on their way, and programs a multiprocessor."""
    m = min(128, max(16, triton.next_power_of_2(num_tokens)))
    tile = {"BM": m, "BN": 64, "BK": 256 if m < 64 else 128, "num_warps": 4, "num_stages": 4, "per_sm": 2}
    return tile | {"BK": min(tile["BK"], (group & -group) if group < width else triton.next_power_of_2(width))}


def fp8_linear(
    codes: torch.Tensor, scales: torch.Tensor, weight: QuantizedWeight, out: torch.Tensor,
    residual: torch.Tensor | None = None, fast: bool = False, tile: dict[str, int] | None = None,
) -> torch.Tensor:  # fmt: skip
    """Codes [R, K] with scales as `quantize_rows` gives them, times the transpose of W: the first rows, `out` [T, outputs].

    `residual` [T, outputs] is added. Sums of a tile of inputs are the tensor cores', those of tiles are float32.
    """
    num_tokens, (rows, width) = len(out), weight.weight.shape
    tile = dict(tile or tile_for(num_tokens, width, weight.columns))
    row_tiles, per_sm = triton.cdiv(rows, tile["BN"]), tile.pop("per_sm")
    most = max(1, width // (2 * tile["BK"]))
    parts = num_parts(row_tiles * token_tiles(num_tokens, tile["BM"]), per_sm * num_sms(codes.device), most)
    pdl = available(codes.device)
    fp8_linear_kernel[(row_tiles, triton.cdiv(num_tokens, tile["BM"]), parts)](
        codes, scales, weight.weight, weight.scale, out if residual is None else residual, parts_for(out, out, parts),
        counters(codes.device), out, scales.stride(1), num_tokens, parts, OUTPUTS=rows, K=width, GROUP_ROWS=weight.rows,
        GROUP=weight.columns, RESIDUAL=residual is not None, SPLIT=parts > 1, FAST=fast, PDL=pdl,
        **({"launch_pdl": True} if pdl else {}), **tile,
    )  # fmt: skip
    return out
