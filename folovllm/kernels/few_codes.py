"""Weights in codes of 8 or 4 bits times very few tokens, on the tensor cores.

To read codes takes half or a quarter of the time of 16-bit weights, so what is done with each counts: with one instruction a
clock, 528 schedulers of an H200 have about eight for each byte that arrives. A tensor core multiplies and adds 2,048 times at
a single instruction, and takes floats of 16 bits; so all that is left is to make such floats of codes. Three things help:

- **No number moves to another thread.** A tensor core wants certain elements in certain threads. But a sum may be taken in any
  order: what a thread has read (16 neighbouring bytes) is given to it as what it should have, and `x` is read in that order.
- **No idle corner.** The smallest product is 16 rows of weights times 8 tokens. With one token, 4 rows are enough: PARTS = 4
  quarters of their inputs are 16 rows, and the quarters of `x` are 8 columns. Of the 16 x 8 results those count where
  a quarter met its own: a diagonal. So a program stays small, and there are many of them.
- **Warps share rows, not registers.** Warp s of SPLITS has every SPLITS-th tile of inputs, as in a batch of products, and
  the sums meet at the end.

As in `small_linear`, a program asks for all its weights before it waits for its inputs. Scales meet sums: of a tile's
products, or of all where a row has one scale.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from folovllm.kernels.fp8 import INTERPRETED
from folovllm.kernels.int4_linear import EXPONENT, code, load_scales
from folovllm.kernels.pdl import launch_options, let_next_start, wait_for_inputs
from folovllm.kernels.small_linear import append

# Four codes of FP8, the bytes of $4, as bfloat16: the bits of a bfloat16 whose exponent counts from another number, 120 less.
FP8_TO_BFLOAT16 = tl.constexpr("""{ .reg .b32 two, bits, power, sign;
    mov.b32 power, 0x7B807B80;
    mov.b32 sign, 0x80008000;
    prmt.b32 two, $4, 0, 0x1404;
    shr.u32 bits, two, 4;
    and.b32 bits, bits, 0x07F007F0;
    lop3.b32 bits, two, sign, bits, 0xEA;
    fma.rn.bf16x2 bits, bits, power, sign;
    mov.b32 {$0, $1}, bits;
    prmt.b32 two, $4, 0, 0x3424;
    shr.u32 bits, two, 4;
    and.b32 bits, bits, 0x07F007F0;
    lop3.b32 bits, two, sign, bits, 0xEA;
    fma.rn.bf16x2 bits, bits, power, sign;
    mov.b32 {$2, $3}, bits; }""")
# Four of int8: seven bits are ones of a bfloat16 from 128 on; 128 is subtracted, or 256 where the eighth, the sign, is set.
INT8_TO_BFLOAT16 = tl.constexpr("""{ .reg .b32 two, ones, less, one, raise;
    mov.b32 raise, 0x43004300;
    mov.b32 one, 0xBF80BF80;
    prmt.b32 two, $4, 0, 0x4140;
    lop3.b32 ones, two, 0x007F007F, raise, 0xEA;
    lop3.b32 less, two, 0x00800080, raise, 0xEA;
    fma.rn.bf16x2 two, less, one, ones;
    mov.b32 {$0, $1}, two;
    prmt.b32 two, $4, 0, 0x4342;
    lop3.b32 ones, two, 0x007F007F, raise, 0xEA;
    lop3.b32 less, two, 0x00800080, raise, 0xEA;
    fma.rn.bf16x2 two, less, one, ones;
    mov.b32 {$2, $3}, two; }""")


@triton.jit
def byte(words, i: tl.constexpr, KIND: tl.constexpr, DTYPE: tl.constexpr):
    """Byte i of each word as a number of DTYPE, not yet multiplied by its scale."""
    if KIND == "int8":
        number = ((words << (24 - 8 * i)) >> 24).to(tl.float32).to(DTYPE)
    elif KIND == "fp8":
        number = ((words >> 8 * i) & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(DTYPE)
    else:  # the bits of a float16 whose exponent counts from another number: 8 less
        bits = (words >> 8 * i).to(tl.int16)
        bits = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
        number = (bits.to(tl.float16, bitcast=True).to(tl.float32) * 256.0).to(DTYPE)
    return number


@triton.jit
def four_bytes(words, KIND: tl.constexpr, DTYPE: tl.constexpr):
    """Words [rows, n] of four codes as numbers [rows, 4 n], in the order of the inputs."""
    OUT: tl.constexpr = "=h,=h,=h,=h,r"
    TYPES: tl.constexpr = (tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16)
    if DTYPE != tl.bfloat16 or INTERPRETED:  # noqa: SIM300
        a, b, c, d = byte(words, 0, KIND, DTYPE), byte(words, 1, KIND, DTYPE), byte(words, 2, KIND, DTYPE), byte(words, 3, KIND, DTYPE)
    elif KIND == "int8":
        a, b, c, d = tl.inline_asm_elementwise(INT8_TO_BFLOAT16, OUT, [words], TYPES, True, 1)
    else:
        a, b, c, d = tl.inline_asm_elementwise(FP8_TO_BFLOAT16, OUT, [words], TYPES, True, 1)
    return tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), [words.shape[0], 4 * words.shape[1]])


def of_byte(select: str) -> tl.constexpr:
    """Assembly: the codes at bits 0 to 3 of one byte of two words, less 8, as two numbers of bfloat16.

    A bfloat16's fraction counts ones from 128 on. So a code, put there, is 128 too large, and 136 are subtracted.
    """
    return tl.constexpr(f"""{{ .reg .b32 both, one, less;
    mov.b32 one, 0x3F803F80;
    mov.b32 less, 0xC308C308;
    prmt.b32 both, $1, $2, {select};
    lop3.b32 both, both, 0x000F000F, 0x43004300, 0xEA;
    fma.rn.bf16x2 $0, both, one, less; }}""")


BYTE_0, BYTE_1, BYTE_2, BYTE_3 = of_byte("0x4400"), of_byte("0x5511"), of_byte("0x6622"), of_byte("0x7733")


@triton.jit
def nibble(words, i: tl.constexpr, exponent, DTYPE: tl.constexpr):
    """Codes i of each word, less 8, exact in DTYPE."""
    if DTYPE != tl.bfloat16 or INTERPRETED:  # noqa: SIM300
        number = code(words, i, exponent).to(DTYPE)
    else:
        if i % 2 == 1:
            words = words >> 4
        if i < 2:
            number = tl.inline_asm_elementwise(BYTE_0, "=r,r,r", [words], tl.bfloat16, True, 2)
        elif i < 4:
            number = tl.inline_asm_elementwise(BYTE_1, "=r,r,r", [words], tl.bfloat16, True, 2)
        elif i < 6:
            number = tl.inline_asm_elementwise(BYTE_2, "=r,r,r", [words], tl.bfloat16, True, 2)
        else:
            number = tl.inline_asm_elementwise(BYTE_3, "=r,r,r", [words], tl.bfloat16, True, 2)
    return number


@triton.jit
def in_turn(tiles):
    """Eight tiles [rows, n] as one [rows, 8 n]."""
    even = tl.join(tl.join(tiles[0], tiles[4]), tl.join(tiles[2], tiles[6]))
    odd = tl.join(tl.join(tiles[1], tiles[5]), tl.join(tiles[3], tiles[7]))
    both = tl.permute(tl.join(even, odd), 0, 2, 3, 4, 1)  # [rows, 2, 2, 2, n]
    return tl.reshape(both, [both.shape[0], 8 * both.shape[4]])




@triton.jit
def in_order(tile, KIND: tl.constexpr):
    """Numbers [8 SPLITS, n] in the order of the inputs as [SPLITS, 8, n] in the order in which a tensor core takes them.

    Any order is right if weights and `x` have the same. This one leaves numbers in the thread that has read them: of four
    threads t has 16 neighbours (or four of each of the 4-bit planes), and a pair of products takes four of them.
    """
    NUM: tl.constexpr = tile.shape[1]
    SPLITS: tl.constexpr = tile.shape[0] // 8
    if KIND != "int4" and NUM == 64:
        tile = tl.permute(tl.reshape(tile, [8 * SPLITS, 4, 2, 2, 2, 2]), 0, 2, 4, 1, 3, 5)
    return tl.reshape(tile, [SPLITS, 8, NUM])


@triton.jit
def load_words(
    word_ptr, rows, word, NUM: tl.constexpr, STEP: tl.constexpr
):  # fmt: skip
    """All tiles of words of some rows. Each is read once, so it leaves the caches to `x` (`evict_first`)."""
    tiles = ()
    for start in tl.static_range(0, NUM, STEP):
        ptr = word_ptr + rows.to(tl.int64) * NUM + start + word
        if start + STEP <= NUM:
            tile = tl.load(ptr, eviction_policy="evict_first")
        else:
            tile = tl.load(ptr, mask=word < NUM - start, other=0, eviction_policy="evict_first")
        tiles = append(tiles, tile)
    return tiles


@triton.jit
def load_inputs(
    ptr, first, NUM: tl.constexpr, GROUP: tl.constexpr, KIND: tl.constexpr, WORDS: tl.constexpr, WHOLE: tl.constexpr
):  # fmt: skip
    """The numbers at `ptr` that WORDS words from `first` [8 SPLITS, 1] on meet, in the order in which a tensor core takes them."""
    if KIND == "int4":
        PLANE: tl.constexpr = GROUP // 8
        word = first + tl.arange(0, WORDS)[None, :]
        at, tiles = ptr + word // PLANE * GROUP + word % PLANE, ()
        for i in tl.static_range(8):
            tiles = append(tiles, tl.load(at + i * PLANE) if WHOLE else tl.load(at + i * PLANE, mask=word < NUM, other=0))
        tile = in_turn(tiles)
    elif WORDS == 16:  # halves, so that four threads share a row of 64, as they do with codes
        column = tl.arange(0, 32)[None, :]
        at, tiles = first * 4 + column // 8 * 16 + column % 8, ()
        for i in tl.static_range(2):
            tiles = append(tiles, tl.load(ptr + at + 8 * i) if WHOLE else tl.load(ptr + at + 8 * i, mask=at + 8 * i < 4 * NUM, other=0))
        tile = tl.reshape(tl.join(tiles[0], tiles[1]), [first.shape[0], 4, 8, 2])
        tile = tl.reshape(tl.permute(tile, 0, 1, 3, 2), [first.shape[0], 64])
    else:
        at = first * 4 + tl.arange(0, 4 * WORDS)[None, :]
        tile = tl.load(ptr + at) if WHOLE else tl.load(ptr + at, mask=at < 4 * NUM, other=0)
    return in_order(tile, KIND)


@triton.jit
def sixteen(words, more, exponent, KIND: tl.constexpr, DTYPE: tl.constexpr):
    """Words [8 SPLITS, WORDS] of rows 0 to 7 and of rows 8 to 15 as numbers [SPLITS, 16, inputs]."""
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
def inverse_root(x_ptr, stride_x, eps, K: tl.constexpr, M: tl.constexpr, AT_ONCE: tl.constexpr):
    """Of each token: one over the root mean square of its `x`, [M]."""
    row_ptr, squares = x_ptr + tl.arange(0, M)[:, None] * stride_x, tl.zeros([M, AT_ONCE], tl.float32)
    for start in tl.static_range(0, K, AT_ONCE):
        k = start + tl.arange(0, AT_ONCE)[None, :]
        if start + AT_ONCE <= K:
            x = tl.load(row_ptr + k).to(tl.float32)
        else:
            x = tl.load(row_ptr + k, mask=k < K, other=0).to(tl.float32)
        squares += x * x
    return tl.rsqrt(tl.sum(squares, 1) / K + eps)


@triton.jit
def few_codes_kernel(
    x_ptr, word_ptr, scale_ptr, zero_ptr, columns_ptr, residual_ptr, out_ptr, stride_x, num_rows, eps, exponent,
    K: tl.constexpr, GROUP_ROWS: tl.constexpr, GROUP: tl.constexpr, KIND: tl.constexpr, NORM: tl.constexpr, GATED: tl.constexpr,
    RESIDUAL: tl.constexpr, M: tl.constexpr, PARTS: tl.constexpr, SPLITS: tl.constexpr, WORDS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program p: outputs p * ROWS to p * ROWS + ROWS of all M tokens, in tiles of WORDS words.

    NORM, GATED and RESIDUAL as in `small_linear_kernel`. GATED: the program's lines are its rows of gate, then those of up.
    GROUP_ROWS outputs and GROUP inputs share a scale; with GROUP = K it is multiplied last.
    """
    let_next_start(PDL)
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    PRECISION: tl.constexpr = "ieee" if DTYPE == tl.float32 else "tf32"  # noqa: SIM300
    LINES: tl.constexpr = 16 // PARTS
    TOKENS: tl.constexpr = 8 // PARTS
    ROWS: tl.constexpr = LINES // (1 + GATED)
    PER_WORD: tl.constexpr = 8 if KIND == "int4" else 4
    NUM: tl.constexpr = K // PER_WORD
    STEP: tl.constexpr = SPLITS * PARTS * WORDS
    GROUPS: tl.constexpr = (K + GROUP - 1) // GROUP
    BY_TILE: tl.constexpr = GROUP < K or zero_ptr is not None
    first = tl.program_id(0) * ROWS
    place, column = tl.arange(0, 8 * SPLITS)[:, None], tl.arange(0, WORDS)[None, :]
    warp, i = place // 8, place % 8  # i: of the rows of a product, or of its columns
    lines = rows_of(first, i, num_rows, ROWS, LINES)
    words = load_words(word_ptr, lines, (warp * PARTS + i // LINES) * WORDS + column, NUM, STEP)
    lines = rows_of(first, i + 8, num_rows, ROWS, LINES)
    more = load_words(word_ptr, lines, (warp * PARTS + (i + 8) // LINES) * WORDS + column, NUM, STEP)
    scales, offsets = (), ()
    i16 = tl.arange(0, 16)[None, :]
    lines = rows_of(first, i16, num_rows, ROWS, LINES) // GROUP_ROWS * GROUPS
    if BY_TILE:
        for c in tl.static_range(len(words)):
            start = ((tl.arange(0, SPLITS)[:, None] * PARTS + i16 // LINES) * WORDS + c * STEP) * PER_WORD
            scale, offset = load_scales(scale_ptr, zero_ptr, lines + start // GROUP, start < K)
            scales, offsets = append(scales, scale[:, :, None]), append(offsets, offset[:, :, None])
    wait_for_inputs(PDL)
    inverse = inverse_root(x_ptr, stride_x, eps, K, M, 256 * SPLITS // M) if NORM else 1.0
    x_ptr += tl.minimum(i % TOKENS, M - 1) * stride_x
    acc = tl.zeros([SPLITS, 16, 8], tl.float32)
    for c in tl.static_range(len(words)):
        word = (warp * PARTS + i // TOKENS) * WORDS + c * STEP
        x = load_inputs(x_ptr, word, NUM, GROUP, KIND, WORDS, (c + 1) * STEP <= NUM)
        if columns_ptr is not None:
            x = x * load_inputs(columns_ptr, word, NUM, GROUP, KIND, WORDS, (c + 1) * STEP <= NUM)
        x = tl.permute(x, 0, 2, 1)
        numbers = sixteen(words[c], more[c], exponent, KIND, DTYPE)
        if BY_TILE:
            acc += tl.dot(numbers, x, input_precision=PRECISION) * scales[c]
        else:
            acc = tl.dot(numbers, x, acc, input_precision=PRECISION)
        if zero_ptr is not None:
            acc += tl.dot(tl.full(numbers.shape, 1.0, DTYPE), x, input_precision=PRECISION) * offsets[c]
    met = tl.arange(0, 16)[:, None] // LINES == tl.arange(0, 8)[None, :] // TOKENS
    acc = tl.reshape(tl.where(met, tl.sum(acc, 0), 0.0), [PARTS, LINES, PARTS, TOKENS])
    y = tl.sum(tl.sum(acc, 2), 0)
    if not BY_TILE:
        line = rows_of(first, tl.arange(0, LINES), num_rows, ROWS, LINES) // GROUP_ROWS
        y *= tl.load(scale_ptr + line).to(tl.float32)[:, None]
    if NORM:
        y *= inverse[None, :]
    if GATED:
        gate, up = tl.split(tl.permute(tl.reshape(y.to(DTYPE).to(tl.float32), [2, ROWS, TOKENS]), 1, 2, 0))
        y = (gate / (1.0 + tl.exp(-gate))).to(DTYPE).to(tl.float32) * up
    outputs, token = first + tl.arange(0, ROWS)[:, None], tl.arange(0, TOKENS)[None, :]
    kept = (outputs < num_rows) & (token < M)
    at = token * num_rows + outputs
    if RESIDUAL:
        y += tl.load(residual_ptr + at, mask=kept, other=0).to(tl.float32)
    tl.store(out_ptr + at, y.to(DTYPE), mask=kept)


@triton.jit
def rows_of(first, i, num_rows, ROWS: tl.constexpr, LINES: tl.constexpr):
    """Which row of weights is row i of a product; past the last one that again."""
    return tl.minimum(first + i % ROWS, num_rows - 1) + i % LINES // ROWS * num_rows


REGISTERS = 84  # of codes, in each thread


def tile_of(num_tokens: int, row_bytes: int, group_bytes: int) -> dict[str, int]:
    """PARTS, SPLITS (warps) and WORDS of a program, for rows of so many bytes of codes, and groups with a scale."""
    parts = 2 if num_tokens > 2 else 4
    splits = triton.next_power_of_2(triton.cdiv(16 // parts * row_bytes, 4 * 32 * REGISTERS))
    words = min(16, (group_bytes & -group_bytes) // 4)
    return {"PARTS": parts, "SPLITS": min(16, splits), "WORDS": words}


def few_codes(
    x: torch.Tensor,
    words: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    group_rows: int,
    group: int,
    kind: str,
    norm_eps: float | None = None,
    gated: bool = False,
    residual: torch.Tensor | None = None,
    columns: torch.Tensor | None = None,
) -> torch.Tensor:
    """`x` [T, K] times the transpose of W [rows, K], for T of 1, 2 or 4; accumulated in float32.

    Args:
        words: [rows, K / 4 or K / 8] int32: codes of 8 bits as they come, of 4 bits in the order of `pack_planes`.
        scales: [rows / group_rows, K / group], floats.
        zeros: of codes of 4 bits, as `int4_linear` has them.
        kind: "fp8", "fp8_bits" (without the card's conversion), "int8" or "int4".
        norm_eps, gated, residual: as in `small_linear`. Rows of `x` may be apart; nothing else is.
        columns: [K], factors of the (normed) `x`, by which it is multiplied in its own dtype.
    """
    num_tokens, width = x.shape
    rows = len(words) // 2 if gated else len(words)
    out = x.new_empty(num_tokens, rows)
    row_bytes = 4 * words.shape[1]
    tile = tile_of(num_tokens, row_bytes, 64 if kind != "int4" and group >= width else row_bytes * group // width)
    lines = 16 // tile["PARTS"] // (1 + gated)
    few_codes_kernel[(triton.cdiv(rows, lines),)](
        x, words, scales, zeros, columns, out if residual is None else residual, out, x.stride(0), rows, norm_eps or 0.0,
        EXPONENT, K=width, GROUP_ROWS=group_rows, GROUP=group, KIND=kind, NORM=norm_eps is not None, GATED=gated,
        RESIDUAL=residual is not None, M=num_tokens, **tile, num_warps=tile["SPLITS"],
        **launch_options(x.device, num_tokens),
    )  # fmt: skip
    return out
