"""Weights that are codes times scales, multiplied on the tensor cores, which take floats of 16 bits: unpacked on the way.

With some tokens, each program unpacks the codes that it needs, so only these are read (`quant_matmul`). With thousands every
code would be unpacked again and again: then all of them are, once, and the library multiplies (`unpacked`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from folovllm.kernels.fp8_cache import INTERPRETED
from folovllm.kernels.multiprocessors import capability_of
from folovllm.kernels.split_sum import counters, num_parts, parts_for, store_sum, token_tiles
from folovllm.quantization.kernels.quant_linear import Codes, kind_of

MANY = 129  # tokens, from which on codes are unpacked before they are multiplied: a second tile would unpack all of them again


# Two codes of FP8, bytes 0 and 1 of $1, as bfloat16: the bits of a bfloat16 whose exponent counts from another number, 120
# less. The instruction that converts to bfloat16 takes one number at a time, at an eighth of the rate of what is here.
PAIR_TO_BFLOAT16 = tl.constexpr("""{ .reg .b32 both, bits, power, zero;
    cvt.u32.u16 both, $1;
    prmt.b32 both, both, 0, 0x1404;
    shr.u32 bits, both, 4;
    and.b32 bits, bits, 0x07F007F0;
    mov.b32 zero, 0x80008000;
    lop3.b32 bits, both, zero, bits, 0xEA;
    mov.b32 power, 0x7B807B80;
    fma.rn.bf16x2 $0, bits, power, zero; }""")


@triton.jit
def unpack(codes, KIND: tl.constexpr, DTYPE: tl.constexpr):
    """Bytes as numbers of DTYPE, not yet multiplied by their scales. All codes of 8 bits are exact in any DTYPE."""
    if KIND == "int8":
        numbers = codes.to(DTYPE)
    elif DTYPE == tl.bfloat16 and not INTERPRETED:  # noqa: SIM300
        numbers = tl.inline_asm_elementwise(PAIR_TO_BFLOAT16, "=r,h", [codes], tl.bfloat16, True, 2)
    elif KIND == "fp8":
        numbers = codes.to(tl.float8e4nv, bitcast=True).to(DTYPE)
    else:  # as in `unpack_pair`
        wide = codes.to(tl.int16)
        numbers = (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True)
        numbers = (numbers * 256.0).to(DTYPE)
    return numbers


@triton.jit(do_not_specialize=["num_tokens", "num_parts"])
def quant_matmul_kernel(
    x_ptr, weight_ptr, scale_ptr, residual_ptr, part_ptr, done_ptr, out_ptr, stride_x, num_tokens, num_parts,
    OUTPUTS: tl.constexpr, K: tl.constexpr, GROUP_ROWS: tl.constexpr, GROUP: tl.constexpr, KIND: tl.constexpr, RESIDUAL: tl.constexpr,
    SPLIT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Program (p, q, s): outputs p * BN to p * BN + BN of tokens q * BM to q * BM + BM; SPLIT: of every num_parts-th tile
    of inputs, from s on.

    The weights are the first factor: on Hopper only that may come from registers, in which codes are unpacked. Each tile's
    product meets its scale at once, which makes the program wait for it. Products that follow each other without that
    would have their weights overwritten while the tensor cores still read them (github.com/triton-lang/triton/issues/9433).
    """
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    PRECISION: tl.constexpr = "ieee" if DTYPE == tl.float32 else "tf32"  # noqa: SIM300
    outputs = tl.program_id(0) * BN + tl.arange(0, BN)
    tokens = tl.program_id(1) * BM + tl.arange(0, BM)
    rows = tl.minimum(outputs, OUTPUTS - 1)
    weight_ptr += rows[:, None].to(tl.int64) * K
    x_ptr += tl.minimum(tokens, num_tokens - 1)[None, :].to(tl.int64) * stride_x
    scale_ptr += rows // GROUP_ROWS * tl.cdiv(K, GROUP)
    acc, scale = tl.zeros([BN, BM], tl.float32), tl.load(scale_ptr)
    first, step = (tl.program_id(2) * BK, num_parts * BK) if SPLIT else (0, BK)
    for start in range(first, K, step):
        k = start + tl.arange(0, BK)
        if K % BK == 0:
            codes = tl.load(weight_ptr + k[None, :])
            x = tl.load(x_ptr + k[:, None])
        else:
            codes = tl.load(weight_ptr + k[None, :], mask=k[None, :] < K, other=0)
            x = tl.load(x_ptr + k[:, None], mask=k[:, None] < K, other=0)
        numbers = unpack(codes, KIND, DTYPE)
        if GROUP < K:
            scale = tl.load(scale_ptr + start // GROUP)
        acc += tl.dot(numbers, x, input_precision=PRECISION) * scale[:, None]
    store_sum(
        acc, part_ptr, done_ptr, residual_ptr, out_ptr, num_tokens, num_parts, OUTPUTS, SPLIT, RESIDUAL)  # fmt: skip


def tiles(num_tokens: int, columns: int, itemsize: int, capability: int) -> dict[str, int]:
    """Tokens, outputs and inputs of a program's tile, its warps, how many tiles are on their way, and programs that there
    should be: what was fastest on an H200 (`tools/bench_weights.py`).

    With few tokens a program has few outputs, so that there are enough programs to keep the memory busy, and each asks for
    many inputs at a time. A tile lies within a group of `columns` inputs. Of float32, of which an item has 4 bytes, there
    is one at a time: small cards have no shared memory for more.
    """
    if num_tokens <= 16:
        shape = {"BM": 16, "BN": 64, "BK": 128, "num_warps": 4, "num_stages": 4, "programs": 264}
    elif num_tokens <= 64:
        shape = {
            "BM": triton.next_power_of_2(num_tokens),
            "BN": 64,
            "BK": 128,
            "num_warps": 4,
            "num_stages": 3,
            "programs": 264,
        }
    else:
        bk = 64 if capability >= 90 else 32  # before Hopper, `x` is in registers too
        shape = {"BM": 128, "BN": 128, "BK": bk, "num_warps": 8, "num_stages": 3, "programs": 132}
    within = min(shape["BK"], columns & -columns)  # the largest power of two that divides a group
    return shape | {"BK": within} | ({"num_stages": 1} if itemsize == 4 else {})


def quant_matmul(x: torch.Tensor, codes: Codes, residual: torch.Tensor | None = None) -> torch.Tensor:
    """`x` [T, inputs] times the transpose of W, plus `residual` [T, outputs]; accumulated in float32."""
    num_tokens, width = x.shape
    rows = len(codes.weight)
    out = x.new_empty(num_tokens, rows)
    per_output = codes.columns >= width
    shape = tiles(num_tokens, 1 << 30 if per_output else codes.columns, x.itemsize, capability_of(x.device))
    shape["BK"] = min(shape["BK"], triton.next_power_of_2(width))
    row_tiles, programs = triton.cdiv(rows, shape["BN"]), shape.pop("programs")
    most = width // (4 * shape["BK"])  # four tiles are worth a program
    parts = num_parts(row_tiles * token_tiles(num_tokens, shape["BM"]), programs, most)
    grid = (row_tiles, triton.cdiv(num_tokens, shape["BM"]), parts)
    quant_matmul_kernel[grid](
        x, codes.weight.view(torch.int8), codes.scale, out if residual is None else residual, parts_for(x, out, parts),
        counters(x.device), out, x.stride(0), num_tokens, parts, OUTPUTS=rows, K=width, GROUP_ROWS=codes.rows,
        GROUP=codes.columns, KIND=kind_of(codes.weight), RESIDUAL=residual is not None, SPLIT=parts > 1, **shape,
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
