"""Codes of 4 bits on the tensor cores, which take floats of 16 bits: unpacked on the way.

As `quant_matmul`, with two differences. A tile of words is eight tiles of weights, one for each place in a word, and each
meets its own inputs: no weight has to move to another thread. And the scale of a group meets sums, where it can: a weight
that is multiplied first would go to the tensor cores by way of shared memory, behind a barrier.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from folovllm.kernels.fp8_cache import INTERPRETED
from folovllm.kernels.split_sum import counters, num_parts, parts_for, store_sum, token_tiles
from folovllm.quantization.kernels.int4_linear import EXPONENT, code, load_scales

MANY = 129  # as in `quant_matmul`; from there on a card may have a variant


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


def of_byte(select: str) -> tl.constexpr:
    """Assembly: the codes at bits 0 to 3 of one byte of two words, as two numbers of bfloat16, 128 more than they are.

    A bfloat16's fraction counts ones from 128 on.
    """
    return tl.constexpr(
        f"{{ .reg .b32 both; prmt.b32 both, $1, $2, {select}; lop3.b32 $0, both, 0x000F000F, 0x43004300, 0xEA; }}"
    )


BYTE_0, BYTE_1, BYTE_2, BYTE_3 = of_byte("0x4400"), of_byte("0x5511"), of_byte("0x6622"), of_byte("0x7733")


@triton.jit
def raised_codes(words, i: tl.constexpr):
    """Codes i of each word, and 128, in bfloat16."""
    if i % 2 == 1:
        words = words >> 4
    if i < 2:
        codes = tl.inline_asm_elementwise(BYTE_0, "=r,r,r", [words], tl.bfloat16, True, 2)
    elif i < 4:
        codes = tl.inline_asm_elementwise(BYTE_1, "=r,r,r", [words], tl.bfloat16, True, 2)
    elif i < 6:
        codes = tl.inline_asm_elementwise(BYTE_2, "=r,r,r", [words], tl.bfloat16, True, 2)
    else:
        codes = tl.inline_asm_elementwise(BYTE_3, "=r,r,r", [words], tl.bfloat16, True, 2)
    return codes


@triton.jit
def whole_codes(words, zero, i: tl.constexpr, exponent, DTYPE: tl.constexpr):
    """Codes i of each word less `zero`, exact in DTYPE."""
    if DTYPE == tl.bfloat16 and not INTERPRETED:  # noqa: SIM300
        numbers = raised_codes(words, i) - (128 + zero)
    else:
        numbers = code(words, i, exponent).to(DTYPE) - (zero - 8)
    return numbers


@triton.jit
def add_group(
    acc, words, x_ptr, scale_ptr, zero_ptr, at, exponent, GROUP: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """`acc`, and the products of a tile of words of one group, `at` [rows, 1], whose codes 0 meet the inputs at `x_ptr`.

    The tensor cores take codes, which are exact and need no scale there: it meets their sums.
    """
    zero = tl.full(at.shape, 8, DTYPE)
    if zero_ptr is not None:
        zero = tl.load(zero_ptr + at).to(DTYPE)
    part = tl.zeros(acc.shape, tl.float32)
    for i in tl.static_range(8):
        x = tl.load(x_ptr + i * (GROUP // 8))
        part = tl.dot(whole_codes(words, zero, i, exponent, DTYPE), x, part, input_precision=PRECISION)
    return acc + part * tl.load(scale_ptr + at).to(tl.float32)


@triton.jit(do_not_specialize=["num_tokens", "num_parts"])
def int4_matmul_kernel(
    x_ptr, word_ptr, scale_ptr, zero_ptr, residual_ptr, part_ptr, done_ptr, out_ptr, stride_x, num_tokens, num_parts, exponent,
    OUTPUTS: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr, RESIDUAL: tl.constexpr, SPLIT: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """Program (p, q, s): outputs p * BN to p * BN + BN of tokens q * BM to q * BM + BM; SPLIT: of every num_parts-th tile
    of inputs, from s on.

    A tile of inputs is WORDS words wide. Where it lies within a group, and zeros are codes, the scale meets sums.
    """
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    PRECISION: tl.constexpr = "ieee" if DTYPE == tl.float32 else "tf32"  # noqa: SIM300
    WHOLE: tl.constexpr = GROUP // 8 % WORDS == 0 and (zero_ptr is None or zero_ptr.dtype.element_ty == tl.uint8)
    outputs = tl.program_id(0) * BN + tl.arange(0, BN)
    tokens = tl.program_id(1) * BM + tl.arange(0, BM)
    rows = tl.minimum(outputs, OUTPUTS - 1).to(tl.int64)[:, None]
    x_ptr += tl.minimum(tokens, num_tokens - 1)[None, :].to(tl.int64) * stride_x
    acc = tl.zeros([BN, BM], tl.float32)
    first, step = (tl.program_id(2), num_parts) if SPLIT else (0, 1)
    for tile in range(first, tl.cdiv(K // 8, WORDS), step):
        if WHOLE:
            word = tl.arange(0, WORDS)
            words = tl.load(word_ptr + rows * (K // 8) + tile * WORDS + word[None, :])
            group, place = tile // (GROUP // 8 // WORDS), tile % (GROUP // 8 // WORDS) * WORDS
            acc = add_group(
                acc, words, x_ptr + (group * GROUP + place + word)[:, None], scale_ptr, zero_ptr,
                rows * (K // GROUP) + group, exponent, GROUP, DTYPE, PRECISION)  # fmt: skip
        else:
            words, scale, offset, input, inside = load_tile(word_ptr, scale_ptr, zero_ptr, rows, tile, K, GROUP, WORDS)
            for i in tl.static_range(8):
                x = tl.load(x_ptr + (input + i * (GROUP // 8))[:, None], mask=inside[:, None], other=0)
                weights = code(words, i, exponent) * scale
                if zero_ptr is not None:
                    weights += offset
                acc = tl.dot(weights.to(DTYPE), x, acc, input_precision=PRECISION)
    store_sum(
        acc, part_ptr, done_ptr, residual_ptr, out_ptr, num_tokens, num_parts, OUTPUTS, SPLIT, RESIDUAL)  # fmt: skip


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


def tiling(num_tokens: int, group_size: int, itemsize: int) -> dict[str, int]:
    """Tokens, outputs and words of a program's tile, its warps, tiles on their way, and programs that there should be (not
    measured yet: chosen by registers and shared memory).

    A tile of words lies within a group where that has at least the 16 that the tensor cores take at a time. `itemsize` is
    that of `x`, as in `quant_matmul.tiles`.
    """
    if num_tokens <= 64:
        bm = max(16, triton.next_power_of_2(num_tokens))
        shape = {"BM": bm, "BN": 64, "num_warps": 4, "num_stages": 3, "programs": 396}
    else:
        shape = {"BM": 128, "BN": 64, "num_warps": 4, "num_stages": 3, "programs": 264}
    most = 32 if shape["BM"] <= 64 else 16  # cards with 99 KiB of shared memory hold no more of 128 tokens
    words = min(most, max(16, group_size // 8 & -(group_size // 8)))
    return shape | {"WORDS": words} | ({"num_stages": 1} if itemsize == 4 else {})


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
    out, shape = x.new_empty(num_tokens, rows), tiling(num_tokens, group_size, x.itemsize)
    row_tiles, programs = triton.cdiv(rows, shape["BN"]), shape.pop("programs")
    most = width // 8 // (4 * shape["WORDS"])  # four tiles are worth a program
    parts = num_parts(row_tiles * token_tiles(num_tokens, shape["BM"]), programs, most)
    grid = (row_tiles, triton.cdiv(num_tokens, shape["BM"]), parts)
    int4_matmul_kernel[grid](
        x, words, scales, zeros, out if residual is None else residual, parts_for(x, out, parts), counters(x.device), out,
        x.stride(0), num_tokens, parts, EXPONENT, OUTPUTS=rows, K=width, GROUP=group_size,
        RESIDUAL=residual is not None, SPLIT=parts > 1, **shape,
    )  # fmt: skip
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
