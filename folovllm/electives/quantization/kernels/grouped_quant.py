"""`grouped_linear` for experts whose weights are codes: each program unpacks those that it multiplies.

So a step reads the codes of the experts that are asked, and nothing else. There is one kernel, whose tiles grow with the
pairs of an expert. With very many a code is unpacked in several programs, once for each tile of pairs: unlike a dense
product (`quant_matmul.unpacked`) there is no other way for them, since all experts in plain floats would be the memory that
codes are there to save.

Weights are the first factor, and tiles are unpacked, as in `quant_matmul`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from folovllm.electives.quantization.kernels.int4_linear import EXPONENT
from folovllm.electives.quantization.kernels.quant_matmul import add_tile, load_inputs, scale_of_rows
from folovllm.electives.quantization.weight import QuantizedWeight, kind_of
from folovllm.kernels.grouped_tiles import find_tile, finish_tile
from folovllm.kernels.variants import capability_of


@triton.jit
def grouped_quant_kernel(
    x_ptr, code_ptr, scale_ptr, zero_ptr, order_ptr, starts_ptr, out_ptr, N, exponent, K: tl.constexpr, E: tl.constexpr,
    WIDTH: tl.constexpr, ASKED: tl.constexpr, GATED: tl.constexpr, GROUP_ROWS: tl.constexpr, GROUP: tl.constexpr,
    KIND: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    """Program (tile of outputs, tile of pairs), as `grouped_linear_kernel`: out[pair] = x[pair // ASKED] W[expert]^T."""
    expert, begin, end = find_tile(starts_ptr, tl.program_id(1), E, WIDTH, TILE_M)
    if expert < E:
        DTYPE: tl.constexpr = out_ptr.dtype.element_ty
        place = begin.to(tl.int32) + tl.arange(0, TILE_M)
        inside = place < end.to(tl.int32)
        # Places behind the expert's last take pair 0: a row that is there, whose product is not stored.
        pair = tl.load(order_ptr + place, mask=inside, other=0).to(tl.int32)
        inputs = x_ptr + (pair // ASKED)[None, :] * K
        n = tl.program_id(0) * TILE_N + tl.arange(0, TILE_N)[:, None]
        rows = expert.to(tl.int64) * (2 * N if GATED else N) + tl.where(n < N, n, 0)
        total = tl.zeros((TILE_N, TILE_M), tl.float32)
        total_up = tl.zeros((TILE_N, TILE_M), tl.float32)
        scale, up_scale = scale_of_rows(scale_ptr, rows, K, GROUP_ROWS, GROUP, KIND), 1.0
        if GATED:
            up_scale = scale_of_rows(scale_ptr, rows + N, K, GROUP_ROWS, GROUP, KIND)
        for tile in range(0, tl.cdiv(K, TILE_K)):
            x = load_inputs(inputs, tile, K, GROUP, KIND, TILE_K)
            total = add_tile(total, x, code_ptr, scale_ptr, zero_ptr, rows, tile, scale, exponent, K, GROUP_ROWS,
                             GROUP, KIND, TILE_K)  # fmt: skip
            if GATED:
                total_up = add_tile(total_up, x, code_ptr, scale_ptr, zero_ptr, rows + N, tile, up_scale, exponent, K,
                                    GROUP_ROWS, GROUP, KIND, TILE_K)  # fmt: skip
        result = finish_tile(total, total_up, DTYPE, GATED)
        tl.store(out_ptr + pair[None, :] * N + n, result, mask=inside[None, :] & (n < N))


def grouped_quant(
    x: torch.Tensor,
    weight: QuantizedWeight,
    num_experts: int,
    order: torch.Tensor,
    starts: torch.Tensor,
    gated: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply each pair's row by the matrix of its expert; accumulated in float32. Nothing waits for the device.

    Args:
        weight: the matrices [N, K] of all experts end to end; gated: [2N, K] each, gate and up.
        x, order, starts, gated, out: as in `grouped_linear`, and so is what is returned.
    """
    num_pairs, k = len(order), x.shape[1]
    n = len(weight.weight) // num_experts // (2 if gated else 1)
    out = x.new_empty(num_pairs, n) if out is None else out
    if num_pairs == 0:
        return out
    if num_pairs * max(n, k) >= 2**31:
        raise ValueError(
            f"{num_pairs} pairs of {max(n, k)} numbers are too many for a kernel: lower max_num_batched_tokens"
        )
    kind, group = kind_of(weight.weight), min(weight.columns, k)
    shape = kernel_config(num_pairs // num_experts, k, group, kind, x.dtype, gated, capability_of(x.device))
    num_tiles = (num_pairs + min(num_experts, num_pairs) * (shape["TILE_M"] - 1)) // shape["TILE_M"]
    grouped_quant_kernel[(triton.cdiv(n, shape["TILE_N"]), num_tiles)](
        x, weight.stored, weight.scale, weight.zeros, order, starts, out, n, EXPONENT, K=k, E=num_experts,
        WIDTH=triton.next_power_of_2(num_experts), ASKED=num_pairs // len(x), GATED=gated, GROUP_ROWS=weight.rows,
        GROUP=group, KIND=kind, **shape,
    )  # fmt: skip
    return out


def kernel_config(
    each: int, k: int, group: int, kind: str, dtype: torch.dtype, gated: bool, capability: int
) -> dict[str, int]:
    """Return tiles of pairs, of outputs and of inputs, warps and stages, by the pairs of an expert (`each`) if all have as many.

    A tile of 8 bits lies within a group, for the sums of a group take its scale; one of words has at least the 16 that the
    tensor cores take at a time. A gated product keeps two sums, so its tiles are half as wide, and more so where both
    factors must be in registers. More than 64 pairs at a time leave no registers for the codes; up to there a tile holds
    the pairs of most experts.
    """
    n, warps, stages = (64 if capability >= 90 else 32, 4, 3) if gated else (128, 8, 3)
    if dtype == torch.float32 or capability < 80:
        m, n, inputs, warps, stages = 16, 32, 32, 4, 2
    elif each <= 8:
        m, inputs = 16, 128
        if kind == "int4":  # eight products for each word: more programs rather than larger ones
            n, warps, stages = 32, 2, 4
    elif each <= 24:
        m, inputs = 32, 128
    else:
        m, inputs = 64, 64
    if kind == "int4":
        most = 32 if m <= 32 else 16  # words: cards with 99 KiB of shared memory hold no more of 64 pairs
        inputs = 8 * min(most, max(16, group // 8 & -(group // 8)))
    elif group < k:
        inputs = min(inputs, group & -group)
    return {"TILE_M": m, "TILE_N": n, "TILE_K": inputs, "num_warps": warps, "num_stages": stages}
