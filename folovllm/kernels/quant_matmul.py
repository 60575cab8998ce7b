"""Weights that are codes times scales, multiplied on the tensor cores, which take floats of 16 bits: unpacked on the way.

With some tokens, each program unpacks the codes that it needs, so only these are read (`quant_matmul`). With thousands every
code would be unpacked again and again: then all of them are, once, and the library multiplies (`unpacked`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from folovllm.kernels.quant_linear import Codes, kind_of

MANY = 512  # tokens, from which on codes are unpacked before they are multiplied (a guess: not measured yet)


@triton.jit
def unpack(codes, KIND: tl.constexpr, DTYPE: tl.constexpr):
    """Bytes as numbers of DTYPE, not yet multiplied by their scales. All codes of 8 bits are exact in any DTYPE."""
    if KIND == "fp8":
        numbers = codes.to(tl.float8e4nv, bitcast=True).to(DTYPE)
    elif KIND == "fp8_bits":  # as in `unpack_pair`
        wide = codes.to(tl.int16)
        numbers = (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True)
        numbers = (numbers * 256.0).to(DTYPE)
    else:
        numbers = codes.to(DTYPE)
    return numbers


@triton.jit(do_not_specialize=["num_tokens"])
def quant_matmul_kernel(
    x_ptr, weight_ptr, scale_ptr, residual_ptr, out_ptr, stride_x, num_tokens, num_rows, K: tl.constexpr,
    GROUP_ROWS: tl.constexpr, GROUP: tl.constexpr, KIND: tl.constexpr, RESIDUAL: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Program (p, q): outputs p * BN to p * BN + BN of tokens q * BM to q * BM + BM.

    The weights are the first factor: on Hopper only that may come from registers, in which codes are unpacked.
    """
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    PRECISION: tl.constexpr = "ieee" if DTYPE == tl.float32 else "tf32"  # noqa: SIM300
    outputs = tl.program_id(0) * BN + tl.arange(0, BN)
    tokens = tl.program_id(1) * BM + tl.arange(0, BM)
    rows = tl.minimum(outputs, num_rows - 1)
    weight_ptr += rows[:, None].to(tl.int64) * K
    x_ptr += tl.minimum(tokens, num_tokens - 1)[None, :].to(tl.int64) * stride_x
    scale_ptr += rows // GROUP_ROWS * tl.cdiv(K, GROUP)
    acc = tl.zeros([BN, BM], tl.float32)
    for start in range(0, K, BK):
        k = start + tl.arange(0, BK)
        if K % BK == 0:
            codes = tl.load(weight_ptr + k[None, :])
            x = tl.load(x_ptr + k[:, None])
        else:
            codes = tl.load(weight_ptr + k[None, :], mask=k[None, :] < K, other=0)
            x = tl.load(x_ptr + k[:, None], mask=k[:, None] < K, other=0)
        numbers = unpack(codes, KIND, DTYPE)
        if GROUP >= K:
            acc = tl.dot(numbers, x, acc, input_precision=PRECISION)
        else:  # sums of a group first: a scale is for all of it
            acc += tl.dot(numbers, x, input_precision=PRECISION) * tl.load(scale_ptr + start // GROUP)[:, None]
    if GROUP >= K:
        acc *= tl.load(scale_ptr)[:, None]
    at = tokens[None, :].to(tl.int64) * num_rows + outputs[:, None]
    kept = (tokens < num_tokens)[None, :] & (outputs < num_rows)[:, None]
    if RESIDUAL:
        acc += tl.load(residual_ptr + at, mask=kept, other=0).to(tl.float32)
    tl.store(out_ptr + at, acc.to(DTYPE), mask=kept)


def tiles(num_tokens: int, columns: int) -> dict[str, int]:
    """Tokens, outputs and inputs of a program's tile, its warps, and how many tiles are on their way (not measured yet).

    With few tokens a program has few outputs, so that there are enough programs to keep the memory busy, and each asks for
    many inputs at a time. A tile lies within a group of `columns` inputs.
    """
    if num_tokens <= 16:
        shape = {"BM": 16, "BN": 32, "BK": 256, "num_warps": 2, "num_stages": 4}
    elif num_tokens <= 32:
        shape = {"BM": 32, "BN": 32, "BK": 128, "num_warps": 2, "num_stages": 4}
    elif num_tokens <= 64:
        shape = {"BM": 64, "BN": 64, "BK": 128, "num_warps": 4, "num_stages": 4}
    else:
        shape = {"BM": 128, "BN": 64, "BK": 64, "num_warps": 8, "num_stages": 4}
    within = min(shape["BK"], columns & -columns)  # the largest power of two that divides a group
    return shape | {"BK": within}


def quant_matmul(x: torch.Tensor, codes: Codes, residual: torch.Tensor | None = None) -> torch.Tensor:
    """`x` [T, inputs] times the transpose of W, plus `residual` [T, outputs]; accumulated in float32."""
    num_tokens, width = x.shape
    rows = len(codes.weight)
    out = x.new_empty(num_tokens, rows)
    per_output = codes.columns >= width
    shape = tiles(num_tokens, 1 << 30 if per_output else codes.columns)
    shape["BK"] = min(shape["BK"], triton.next_power_of_2(width))
    grid = (triton.cdiv(rows, shape["BN"]), triton.cdiv(num_tokens, shape["BM"]))
    quant_matmul_kernel[grid](
        x, codes.weight.view(torch.int8), codes.scale, out if residual is None else residual, out, x.stride(0),
        num_tokens, rows, K=width, GROUP_ROWS=codes.rows, GROUP=codes.columns, KIND=kind_of(codes.weight),
        RESIDUAL=residual is not None, **shape,
    )  # fmt: skip
    return out


@triton.jit
def unpack_kernel(
    weight_ptr, scale_ptr, out_ptr, K: tl.constexpr, GROUP_ROWS: tl.constexpr, GROUP: tl.constexpr,
    KIND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (p, q): of output p the inputs q * BLOCK to q * BLOCK + BLOCK."""
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    row, k = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = row.to(tl.int64) * K + k
    numbers = unpack(tl.load(weight_ptr + at, mask=k < K, other=0), KIND, tl.float32)
    scales = tl.load(scale_ptr + row // GROUP_ROWS * tl.cdiv(K, GROUP) + k // GROUP, mask=k < K, other=0.0)
    tl.store(out_ptr + at, (numbers * scales).to(DTYPE), mask=k < K)


def unpacked(codes: Codes, dtype: torch.dtype) -> torch.Tensor:
    """W [outputs, inputs] in `dtype`."""
    rows, width = codes.weight.shape
    out = torch.empty(rows, width, dtype=dtype, device=codes.weight.device)
    block = min(2048, triton.next_power_of_2(width))
    unpack_kernel[(rows, triton.cdiv(width, block))](
        codes.weight.view(torch.int8), codes.scale, out, K=width, GROUP_ROWS=codes.rows, GROUP=codes.columns,
        KIND=kind_of(codes.weight), BLOCK=block, num_warps=4,
    )  # fmt: skip
    return out
