"""What a program of `quant_gemv` reads, in the order in which a tensor core takes it: words, their factors, and inputs.

The smallest product is 16 lines of weights times 8 columns. A line is a part of a row, one of PARTS, and column c holds a
part of `x` that belongs to token c % (8 / PARTS). Each of SPLITS warps has every SPLITS-th tile of WORDS words of all parts.
"""

from __future__ import annotations

import triton
import triton.language as tl

from folovllm.electives.quantization.kernels.int4_linear import load_scales
from folovllm.electives.quantization.kernels.quantize_rows import factors_of, to_e4m3
from folovllm.electives.quantization.kernels.unpack_codes import four_bytes, in_turn, nibble
from folovllm.kernels.skinny_linear import append, repeat, silu_product


@triton.jit
def in_order(tile, KIND: tl.constexpr):
    """Numbers [8 SPLITS, n] in the order of the inputs as [SPLITS, 8, n] in the order in which a tensor core takes them.

    Any order is right if weights and `x` have the same. This one leaves numbers in the thread that has read them: of four
    threads t has 16 neighbours, of which a product of 16 inputs takes four. Of 4 bits the order of the inputs is that.
    """
    NUM: tl.constexpr = tile.shape[1]
    SPLITS: tl.constexpr = tile.shape[0] // 8
    if KIND != "int4" and NUM == 64:
        tile = tl.permute(tl.reshape(tile, [8 * SPLITS, 4, 2, 2, 2, 2]), 0, 2, 4, 1, 3, 5)
    return tl.reshape(tile, [SPLITS, 8, NUM])


@triton.jit
def row_of(first, i, num_rows, ROWS: tl.constexpr, LINES: tl.constexpr):
    """Which row of weights is row i of a product. Past the last one that again."""
    return tl.minimum(first + i % ROWS, num_rows - 1) + i % LINES // ROWS * num_rows


@triton.jit
def load_words(word_ptr, first, num_rows, NUM: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr,
               SPLITS: tl.constexpr, WORDS: tl.constexpr):  # fmt: skip
    """All words of the 16 / PARTS lines from `first` on: of each tile two [8 SPLITS, WORDS].

    Each word is read once, so it leaves the caches to `x` (`evict_first`).
    """
    LINES: tl.constexpr = 16 // PARTS
    STEP: tl.constexpr = SPLITS * PARTS * WORDS
    place, column, tiles = tl.arange(0, 8 * SPLITS)[:, None], tl.arange(0, WORDS)[None, :], ()
    for start in tl.static_range(0, NUM, STEP):
        for i in tl.static_range(0, 16, 8):
            line = place % 8 + i
            word = (place // 8 * PARTS + line // LINES) * WORDS + column + start
            ptr = word_ptr + row_of(first, line, num_rows, ROWS, LINES).to(tl.int64) * NUM + word
            if start + STEP <= NUM:
                tile = tl.load(ptr, eviction_policy="evict_first")
            else:
                tile = tl.load(ptr, mask=word < NUM, other=0, eviction_policy="evict_first")
            tiles = append(tiles, tile)
    return tiles


@triton.jit
def load_factors(
    scale_ptr, zero_ptr, first, num_rows, COUNT: tl.constexpr, K: tl.constexpr, GROUP_ROWS: tl.constexpr, GROUP: tl.constexpr,
    ROWS: tl.constexpr, PARTS: tl.constexpr, SPLITS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Of each of COUNT tiles, STEP inputs apart, what `load_scales` has for its rows, [SPLITS, 16]; offsets if there are zeros."""
    row, factors = tl.arange(0, 16)[None, :], ()
    groups = row_of(first, row, num_rows, ROWS, 16 // PARTS) // GROUP_ROWS * tl.cdiv(K, GROUP)
    part = tl.arange(0, SPLITS)[:, None] * PARTS + row // (16 // PARTS)
    for c in tl.static_range(COUNT):
        input = part * (STEP // (SPLITS * PARTS)) + c * STEP
        scale, offset = load_scales(scale_ptr, zero_ptr, groups + input // GROUP, input < K)
        factors = append(factors, (scale,) if zero_ptr is None else (scale, offset))
    return factors


@triton.jit
def load_or_zero(ptr, inside, WHOLE: tl.constexpr):
    """What is there, and zeros outside; nothing is outside if WHOLE."""
    return tl.load(ptr) if WHOLE else tl.load(ptr, mask=inside, other=0)


@triton.jit
def load_pieces(
    ptr, first, NUM: tl.constexpr, GROUP: tl.constexpr, KIND: tl.constexpr, WORDS: tl.constexpr, WHOLE: tl.constexpr
):  # fmt: skip
    """The numbers at `ptr` that WORDS words from `first` [8 SPLITS, 1] on meet, as they are read.

    Of 4 bits eight tiles [8 SPLITS, WORDS], a tile for each code of a word; of 8 bits the inputs in turn, in one tile
    [8 SPLITS, 4 WORDS], or if there are 64 in two: the lower and the upper eight of each 16. So four threads share them as
    they do 64 codes.
    """
    pieces = ()
    if KIND == "int4":
        PLANE: tl.constexpr = GROUP // 8
        word = first + tl.arange(0, WORDS)[None, :]
        at = ptr + word // PLANE * GROUP + word % PLANE
        for i in tl.static_range(8):
            pieces = append(pieces, load_or_zero(at + i * PLANE, word < NUM, WHOLE))
    elif WORDS == 16:
        column = tl.arange(0, 32)[None, :]
        at = first * 4 + column // 8 * 16 + column % 8
        for i in tl.static_range(0, 16, 8):
            pieces = append(pieces, load_or_zero(ptr + at + i, at + i < 4 * NUM, WHOLE))
    else:
        at = first * 4 + tl.arange(0, 4 * WORDS)[None, :]
        pieces = append(pieces, load_or_zero(ptr + at, at < 4 * NUM, WHOLE))
    return pieces


@triton.jit
def load_inputs(
    ptr, first, NUM: tl.constexpr, GROUP: tl.constexpr, KIND: tl.constexpr, WORDS: tl.constexpr, WHOLE: tl.constexpr
):  # fmt: skip
    """The same in the order in which a tensor core takes them."""
    pieces = load_pieces(ptr, first, NUM, GROUP, KIND, WORDS, WHOLE)
    if len(pieces) == 8:
        tile = in_turn(pieces)
    elif len(pieces) == 2:
        both = tl.permute(tl.reshape(tl.join(pieces[0], pieces[1]), [first.shape[0], 4, 8, 2]), 0, 1, 3, 2)
        tile = tl.reshape(both, [first.shape[0], 64])
    else:
        tile = pieces[0]
    return in_order(tile, KIND)


@triton.jit
def load_tile(
    x_ptr, columns_ptr, stride_x, start: tl.constexpr, NUM: tl.constexpr, GROUP: tl.constexpr, KIND: tl.constexpr,
    M: tl.constexpr, PARTS: tl.constexpr, SPLITS: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """`x` times its columns' factors, [SPLITS, n, 8], where it meets the tile of words from `start` on."""
    TOKENS: tl.constexpr = 8 // PARTS
    WHOLE: tl.constexpr = start + SPLITS * PARTS * WORDS <= NUM
    place = tl.arange(0, 8 * SPLITS)[:, None]
    word = (place // 8 * PARTS + place % 8 // TOKENS) * WORDS + start
    x = load_inputs(x_ptr + tl.minimum(place % TOKENS, M - 1) * stride_x, word, NUM, GROUP, KIND, WORDS, WHOLE)
    if columns_ptr is not None:
        x *= load_inputs(columns_ptr, word, NUM, GROUP, KIND, WORDS, WHOLE)
    return tl.permute(x, 0, 2, 1)


@triton.jit
def as_halves(xs):
    """Tiles of `x` [SPLITS, n, 8] as float16, divided by the largest of each column; and that, [SPLITS, 1, 8].

    A float16 has three bits more than a bfloat16: a quotient is off by 2^-11 of itself at most, where a bfloat16 is by 2^-8.
    Below 2^-14 of the largest it is off by 2^-25 of that. The divisor is held within 2^-125 and 2^125, where one over it is a
    normal number: Inf stays Inf, and NaN, which no maximum sees, NaN.
    """
    peak, halves = tl.zeros(xs[0].shape, tl.float32), ()
    for c in tl.static_range(len(xs)):
        peak = tl.maximum(peak, tl.abs(xs[c].to(tl.float32)))
    peak = tl.minimum(tl.maximum(tl.max(peak, 1, keep_dims=True), 2.0**-125), 2.0**125)
    inverse = 1.0 / peak
    for c in tl.static_range(len(xs)):
        halves = append(halves, (xs[c].to(tl.float32) * inverse).to(tl.float16))
    return halves, peak


@triton.jit
def as_codes(xs, GROUP: tl.constexpr, PARTS: tl.constexpr):
    """Tiles of one token's `x` rounded to E4M3, as float16, and the scale of each, [SPLITS or 1, 1, 8 or 1].

    A scale is that of the token, or of each 128 inputs if GROUP is that: two tiles of 64, which parts 2 i and 2 i + 1 have.
    """
    SPLITS: tl.constexpr = xs[0].shape[0]
    peaks, codes, scales = (), (), ()
    peak = tl.zeros([SPLITS, 8], tl.float32)
    for c in tl.static_range(len(xs)):
        largest = tl.max(tl.abs(xs[c].to(tl.float32)), 1)
        peak = tl.maximum(peak, largest)
        if GROUP == 128:
            pairs = tl.reshape(largest, [SPLITS, PARTS // 2, 2, 8 // PARTS])
            pairs = tl.broadcast_to(tl.max(pairs, 2, keep_dims=True), [SPLITS, PARTS // 2, 2, 8 // PARTS])
            largest = tl.reshape(pairs, [SPLITS, 8])
        peaks = append(peaks, largest)
    if GROUP != 128:
        peaks = repeat(tl.max(tl.max(peak, 1, keep_dims=True), 0, keep_dims=True), len(xs))
    for c in tl.static_range(len(xs)):
        scale, factor = factors_of(peaks[c][:, None, :])
        codes, scales = append(codes, to_e4m3(xs[c].to(tl.float32) * factor).to(tl.float16)), append(scales, scale)
    return codes, scales


@triton.jit
def sixteen(words, more, exponent, KIND: tl.constexpr, DTYPE: tl.constexpr):
    """Words [8 SPLITS, WORDS] of rows 0 to 7, and of rows 8 to 15, as numbers [SPLITS, 16, inputs]."""
    if KIND == "int4":
        low, high = (), ()
        for i in tl.static_range(8):
            low, high = append(low, nibble(words, i, exponent, DTYPE)), append(high, nibble(more, i, exponent, DTYPE))
        low, high = in_turn(low), in_turn(high)
    else:
        low, high = four_bytes(words, KIND, DTYPE), four_bytes(more, KIND, DTYPE)
    both = tl.permute(tl.join(in_order(low, KIND), in_order(high, KIND)), 0, 3, 1, 2)
    return tl.reshape(both, [both.shape[0], 16, both.shape[3]])


@triton.jit
def load_lines(
    word_ptr, scale_ptr, zero_ptr, first, num_rows, K: tl.constexpr, GROUP_ROWS: tl.constexpr, GROUP: tl.constexpr,
    ROWS: tl.constexpr, NUM: tl.constexpr, PARTS: tl.constexpr, SPLITS: tl.constexpr, WORDS: tl.constexpr,
    BY_TILE: tl.constexpr,
):  # fmt: skip
    """What a program reads of a group of lines: all its words; and their factors, if each tile has its own."""
    words, factors = load_words(word_ptr, first, num_rows, NUM, ROWS, PARTS, SPLITS, WORDS), ()
    if BY_TILE:
        STEP: tl.constexpr = K // NUM * SPLITS * PARTS * WORDS
        factors = load_factors(
            scale_ptr, zero_ptr, first, num_rows, len(words) // 2, K, GROUP_ROWS, GROUP, ROWS, PARTS, SPLITS, STEP)  # fmt: skip
    return words, factors


@triton.jit
def inverse_root(x_ptr, stride_x, eps, K: tl.constexpr, M: tl.constexpr, AT_ONCE: tl.constexpr):
    """Of each token: one over the root mean square of its `x`, [1, M]."""
    row_ptr, squares = x_ptr + tl.arange(0, M)[:, None] * stride_x, tl.zeros([M, AT_ONCE], tl.float32)
    for start in tl.static_range(0, K, AT_ONCE):
        k = start + tl.arange(0, AT_ONCE)[None, :]
        x = load_or_zero(row_ptr + k, k < K, start + AT_ONCE <= K).to(tl.float32)
        squares += x * x
    return tl.rsqrt(tl.sum(squares, 1) / K + eps)[None, :]


@triton.jit
def sum_parts(acc, PARTS: tl.constexpr):
    """Of products [SPLITS, 16, columns] those of a part with itself, added up: [16 / PARTS lines, columns / PARTS]."""
    LINES: tl.constexpr = 16 // PARTS
    TOKENS: tl.constexpr = acc.shape[2] // PARTS
    met = tl.arange(0, 16)[:, None] // LINES == tl.arange(0, PARTS * TOKENS)[None, :] // TOKENS
    each = tl.reshape(tl.where(met, tl.sum(acc, 0), 0.0), [PARTS, LINES, PARTS, TOKENS])
    return tl.sum(tl.sum(each, 2), 0)


@triton.jit
def silu_times(y, DTYPE: tl.constexpr):
    """Lines of gate and then of up, [2 ROWS, TOKENS], as `silu_product` has them."""
    gate, up = tl.split(tl.permute(tl.reshape(y, [2, y.shape[0] // 2, y.shape[1]]), 1, 2, 0))
    return silu_product(gate, up, DTYPE)


@triton.jit
def load_row_scales(scale_ptr, first, num_rows, GROUP_ROWS: tl.constexpr, ROWS: tl.constexpr, LINES: tl.constexpr):
    """The scales of the lines from `first` on, [lines, 1], where a row has one."""
    line = row_of(first, tl.arange(0, LINES)[:, None], num_rows, ROWS, LINES)
    return tl.load(scale_ptr + line // GROUP_ROWS).to(tl.float32)


@triton.jit
def load_residual(residual_ptr, first, num_rows, ROWS: tl.constexpr, TOKENS: tl.constexpr, M: tl.constexpr):
    """What is added to the outputs from `first` on, [ROWS, TOKENS]. To ask for it early saves the wait for it at the end."""
    outputs, token = first + tl.arange(0, ROWS)[:, None], tl.arange(0, TOKENS)[None, :]
    kept = (outputs < num_rows) & (token < M)
    return tl.load(residual_ptr + token * num_rows + outputs, mask=kept, other=0).to(tl.float32)


@triton.jit
def finish(y, residual, out_ptr, first, num_rows, inverse, GATED: tl.constexpr, M: tl.constexpr):
    """Store the outputs from `first` on: sums `y` [lines, tokens] times `inverse`, gated if GATED, plus `residual` (0: none)."""
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    ROWS: tl.constexpr = y.shape[0] // (1 + GATED)
    y *= inverse
    y = silu_times(y, DTYPE) if GATED else y
    outputs, token = first + tl.arange(0, ROWS)[:, None], tl.arange(0, y.shape[1])[None, :]
    kept = (outputs < num_rows) & (token < M)
    tl.store(out_ptr + token * num_rows + outputs, (y + residual).to(DTYPE), mask=kept)
