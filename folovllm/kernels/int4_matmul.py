"""Codes of 4 bits on the tensor cores, which take floats of 16 bits: unpacked on the way.

As `quant_matmul`, with two differences. A tile of words is eight tiles of weights, one for each place in a word, and each
meets its own inputs: no weight has to move to another thread. And few tokens leave so few tiles of outputs that several
programs share the inputs of one (`PARTS`); their sums are added up afterwards, always in the same order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from folovllm.kernels.int4_linear import EXPONENT, code, load_scales

MANY = 512  # tokens, from which on codes are unpacked before they are multiplied (a guess: not measured yet)
PROGRAMS = 256  # that there should be


@triton.jit
def load_tile(
    word_ptr, scale_ptr, zero_ptr, rows, tile, K: tl.constexpr, GROUP: tl.constexpr, WORDS: tl.constexpr
):  # fmt: skip
    """A tile of words of some `rows` [rows, 1]: [rows, WORDS].

    Returns the words; two factors (`load_scales`), [rows, 1] where the tile lies within a group and [rows, WORDS] where it
    does not; which inputs codes 0 meet [WORDS]; and which of them there are. Codes i meet those i * GROUP / 8 further on.
    """
    OF_GROUP: tl.constexpr = GROUP // 8  # words
    word = tile * WORDS + tl.arange(0, WORDS)
    inside = word < K // 8
    if OF_GROUP % WORDS == 0:  # one group, of which the tile is a part
        TILES: tl.constexpr = OF_GROUP // WORDS
        group = tile // TILES
        input = group * GROUP + tile % TILES * WORDS + tl.arange(0, WORDS)
        scale, offset = load_scales(scale_ptr, zero_ptr, rows * (K // GROUP) + group, rows >= 0)
    else:
        group = word // OF_GROUP
        input = group * GROUP + word % OF_GROUP
        at = rows * (K // GROUP) + group[None, :]
        scale, offset = load_scales(scale_ptr, zero_ptr, at, inside[None, :])
    words = tl.load(word_ptr + rows * (K // 8) + word[None, :], mask=inside[None, :], other=0)
    return words, scale, offset, input, inside


@triton.jit(do_not_specialize=["num_tokens"])
def int4_matmul_kernel(
    x_ptr, word_ptr, scale_ptr, zero_ptr, residual_ptr, out_ptr, stride_x, num_tokens, num_rows, exponent,
    K: tl.constexpr, GROUP: tl.constexpr, RESIDUAL: tl.constexpr, PARTS: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """Program (p, q, s): outputs p * BN to p * BN + BN of tokens q * BM to q * BM + BM; every PARTS-th tile of inputs.

    A tile of inputs is WORDS words wide. `out` is [PARTS, num_tokens, num_rows].
    """
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    PRECISION: tl.constexpr = "ieee" if DTYPE == tl.float32 else "tf32"  # noqa: SIM300
    outputs = tl.program_id(0) * BN + tl.arange(0, BN)
    tokens = tl.program_id(1) * BM + tl.arange(0, BM)
    rows = tl.minimum(outputs, num_rows - 1).to(tl.int64)[:, None]
    x_ptr += tl.minimum(tokens, num_tokens - 1)[None, :].to(tl.int64) * stride_x
    acc = tl.zeros([BN, BM], tl.float32)
    for tile in range(tl.program_id(2), tl.cdiv(K // 8, WORDS), PARTS):
        words, scale, offset, input, inside = load_tile(word_ptr, scale_ptr, zero_ptr, rows, tile, K, GROUP, WORDS)
        for i in tl.static_range(8):
            x = tl.load(x_ptr + (input + i * (GROUP // 8))[:, None], mask=inside[:, None], other=0)
            weights = code(words, i, exponent) * scale
            if zero_ptr is not None:
                weights += offset
            acc = tl.dot(weights.to(DTYPE), x, acc, input_precision=PRECISION)
    at = (tl.program_id(2).to(tl.int64) * num_tokens + tokens[None, :]) * num_rows + outputs[:, None]
    kept = (tokens < num_tokens)[None, :] & (outputs < num_rows)[:, None]
    if RESIDUAL:
        acc += tl.load(residual_ptr + at, mask=kept, other=0).to(tl.float32)
    tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=kept)


@triton.jit(do_not_specialize=["num"])
def add_parts_kernel(
    part_ptr, residual_ptr, out_ptr, num, PARTS: tl.constexpr, RESIDUAL: tl.constexpr, BLOCK: tl.constexpr
):
    """The sums of all parts [PARTS, num], and the residual [num]."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(part_ptr + part * num + at, mask=at < num, other=0)
    if RESIDUAL:
        total += tl.load(residual_ptr + at, mask=at < num, other=0).to(tl.float32)
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=at < num)


@triton.jit
def int4_unpack_kernel(
    word_ptr, scale_ptr, zero_ptr, out_ptr, exponent, K: tl.constexpr, GROUP: tl.constexpr, WORDS: tl.constexpr
):  # fmt: skip
    """Program (p, q): of output p the words q * WORDS to q * WORDS + WORDS."""
    OF_GROUP: tl.constexpr = GROUP // 8  # words
    row, word = tl.program_id(0).to(tl.int64), tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    inside, group = word < K // 8, word // OF_GROUP
    words = tl.load(word_ptr + row * (K // 8) + word, mask=inside, other=0)
    scale, offset = load_scales(scale_ptr, zero_ptr, row * (K // GROUP) + group, inside)
    for i in tl.static_range(8):
        weights = code(words, i, exponent) * scale
        if zero_ptr is not None:
            weights += offset
        at = row * K + group * GROUP + i * OF_GROUP + word % OF_GROUP
        tl.store(out_ptr + at, weights.to(out_ptr.dtype.element_ty), mask=inside)


def tiling(num_tokens: int, num_rows: int, width: int, group_size: int, itemsize: int) -> dict[str, int]:
    """Tokens, outputs and words of a program's tile, its warps, tiles on their way, and parts (not measured yet).

    A tile of words lies within a group where that has at least the 16 that the tensor cores take at a time. `itemsize` is
    that of `x`, as in `quant_matmul.tiles`.
    """
    bm = min(128, max(16, triton.next_power_of_2(num_tokens)))
    bn, num_warps = 64, 4 if bm <= 64 else 8
    words = min(32, max(16, group_size // 8 & -(group_size // 8)))
    programs = triton.cdiv(num_tokens, bm) * triton.cdiv(num_rows, bn)
    most = triton.cdiv(width // 8, 4 * words)  # four tiles are worth a program
    parts = max(1, min(16, most, PROGRAMS // programs)) if bm <= 64 else 1
    return {
        "BM": bm,
        "BN": bn,
        "WORDS": words,
        "PARTS": parts,
        "num_warps": num_warps,
        "num_stages": 1 if itemsize == 4 else 3,
    }


def int4_matmul(
    x: torch.Tensor,
    words: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """`x` [T, K] times the transpose of W, as `int4_linear`, for any T; plus `residual` [T, rows]."""
    num_tokens, width = x.shape
    rows, group_size = len(words), width // scales.shape[1]
    out, shape = x.new_empty(num_tokens, rows), tiling(num_tokens, rows, width, group_size, x.itemsize)
    parts = shape["PARTS"]
    sums = out if parts == 1 else x.new_empty(parts, num_tokens, rows, dtype=torch.float32)
    added = out if residual is None else residual
    grid = (triton.cdiv(rows, shape["BN"]), triton.cdiv(num_tokens, shape["BM"]), parts)
    int4_matmul_kernel[grid](
        x, words, scales, zeros, added, sums, x.stride(0), num_tokens, rows, EXPONENT, K=width, GROUP=group_size,
        RESIDUAL=residual is not None and parts == 1, **shape,
    )  # fmt: skip
    if parts > 1:
        add_parts_kernel[(triton.cdiv(out.numel(), 1024),)](
            sums, added, out, out.numel(), PARTS=parts, RESIDUAL=residual is not None, BLOCK=1024, num_warps=4
        )
    return out


def unpacked(words: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """W [rows, K] in `dtype`."""
    rows, width = len(words), 8 * words.shape[1]
    out = torch.empty(rows, width, dtype=dtype, device=words.device)
    block = min(512, triton.next_power_of_2(width // 8))
    int4_unpack_kernel[(rows, triton.cdiv(width // 8, block))](
        words, scales, zeros, out, EXPONENT, K=width, GROUP=width // scales.shape[1], WORDS=block, num_warps=4
    )
    return out
