"""Weights in codes of 8 or 4 bits times very few tokens, on the tensor cores.

Codes are read in half or a quarter of the time of 16-bit weights, and what is then done with each takes as long. To multiply
and add is most of that, with more than one token. A tensor core does 2,048 of these in one instruction, of floats of 16 bits;
so all that is left is to make such floats (`unpack_codes`). Three things make it fit:

- **No number moves to another thread.** A tensor core wants certain elements in certain threads. But a sum may be taken in any
  order. So what a thread has read, 16 neighbouring bytes, is given to the tensor core as if it were what that thread should
  have, and `x` is read in the same order.
- **No idle corner.** The smallest product is 16 rows of weights times 8 tokens. With one token four rows are enough:
  PARTS = 4 quarters of their inputs are 16 rows, and the quarters of `x` are 8 columns. Of the 16 x 8 results those count
  where a part has met its own. So programs stay small, and there are many of them.
- **Warps share rows.** Of SPLITS warps each has every SPLITS-th tile of inputs, as in a batch of products. Their sums meet
  at the end.

As in `small_linear`, a program asks for all its weights before it waits for its inputs. A scale meets the sum of a tile's
products, or of all where a row has one scale.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from folovllm.kernels.int4_linear import EXPONENT, load_scales
from folovllm.kernels.pdl import ask_cache, launch_options, let_next_start, wait_for_inputs
from folovllm.kernels.small_linear import append
from folovllm.kernels.unpack_codes import SHIFT, four_bytes, in_turn, nibble


@triton.jit
def in_order(tile, KIND: tl.constexpr):
    """Numbers [8 SPLITS, n] in the order of the inputs as [SPLITS, 8, n] in the order in which a tensor core takes them.

    Any order is right if weights and `x` have the same. This one leaves numbers in the thread that has read them: of four
    threads t has 16 neighbours, of which a product of 16 inputs takes four.
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
               SPLITS: tl.constexpr, BLOCKS: tl.constexpr, WORDS: tl.constexpr):  # fmt: skip
    """All words of the 16 / PARTS lines from `first` on, if `wanted`: of each tile two [8 SPLITS, WORDS].

    Each word is read once, so it leaves the caches to `x` (`evict_first`).
    """
    LINES: tl.constexpr = 16 // PARTS
    STEP: tl.constexpr = SPLITS * PARTS * WORDS
    place, column, tiles = tl.arange(0, 8 * BLOCKS * SPLITS)[:, None], tl.arange(0, WORDS)[None, :], ()
    first += place // (8 * SPLITS) * ROWS
    for start in tl.static_range(0, NUM, STEP):
        for i in tl.static_range(0, 16, 8):
            line = place % 8 + i
            word = (place // 8 % SPLITS * PARTS + line // LINES) * WORDS + column + start
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
    ROWS: tl.constexpr, PARTS: tl.constexpr, SPLITS: tl.constexpr, BLOCKS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Of each of COUNT tiles, STEP inputs apart, what `load_scales` has for its rows: two [SPLITS, 16]."""
    row, warp, factors = tl.arange(0, 16)[None, :], tl.arange(0, BLOCKS * SPLITS)[:, None], ()
    first += warp // SPLITS * ROWS
    groups = row_of(first, row, num_rows, ROWS, 16 // PARTS) // GROUP_ROWS * tl.cdiv(K, GROUP)
    part = warp % SPLITS * PARTS + row // (16 // PARTS)
    for c in tl.static_range(COUNT):
        input = part * (STEP // (SPLITS * PARTS)) + c * STEP
        scale, offset = load_scales(scale_ptr, zero_ptr, groups + input // GROUP, input < K)
        factors = append(append(factors, scale), offset) if zero_ptr is not None else append(factors, scale)
    return factors


@triton.jit
def load_or_zero(ptr, inside, WHOLE: tl.constexpr):
    """What is there, and zeros outside; nothing is outside if WHOLE."""
    return tl.load(ptr) if WHOLE else tl.load(ptr, mask=inside, other=0)


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
            tiles = append(tiles, load_or_zero(at + i * PLANE, word < NUM, WHOLE))
        tile = in_turn(tiles)
    else:
        at = first * 4 + tl.arange(0, 4 * WORDS)[None, :]
        tile = load_or_zero(ptr + at, at < 4 * NUM, WHOLE)
    return in_order(tile, KIND)


@triton.jit
def load_tile(
    x_ptr, columns_ptr, stride_x, start: tl.constexpr, NUM: tl.constexpr, GROUP: tl.constexpr, KIND: tl.constexpr,
    M: tl.constexpr, PARTS: tl.constexpr, SPLITS: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """`x` times its columns' factors, [SPLITS, 8, n], where it meets the tile of words from `start` on."""
    TOKENS: tl.constexpr = 8 // PARTS
    WHOLE: tl.constexpr = start + SPLITS * PARTS * WORDS <= NUM
    place = tl.arange(0, 8 * SPLITS)[:, None]
    x_ptr += tl.minimum(place % TOKENS, M - 1) * stride_x
    word = (place // 8 * PARTS + place % 8 // TOKENS) * WORDS + start
    x = load_inputs(x_ptr, word, NUM, GROUP, KIND, WORDS, WHOLE)
    if columns_ptr is not None:
        x *= load_inputs(columns_ptr, word, NUM, GROUP, KIND, WORDS, WHOLE)
    return x


@triton.jit
def repeat(tile, BLOCKS: tl.constexpr):
    """[SPLITS, ...] as [BLOCKS * SPLITS, ...], the same for each block."""
    many = tl.broadcast_to(tile[None, :, :, :], [BLOCKS, tile.shape[0], tile.shape[1], tile.shape[2]])
    return tl.reshape(many, [BLOCKS * tile.shape[0], tile.shape[1], tile.shape[2]])


@triton.jit
def as_halves(xs, BLOCKS: tl.constexpr):
    """Tiles of `x` [SPLITS, 8, n] as float16, divided by the largest of each row; and that, [BLOCKS * SPLITS, 1, 8].

    A float16 has three bits more than a bfloat16, so nothing is lost but the range, and codes of 8 bits are faster there.
    """
    peak, halves = tl.zeros(xs[0].shape, tl.float32), ()
    for c in tl.static_range(len(xs)):
        peak = tl.maximum(peak, tl.abs(xs[c].to(tl.float32)))
    peak = tl.maximum(tl.max(peak, 2, keep_dims=True), 1e-30)
    inverse = 1.0 / peak
    for c in tl.static_range(len(xs)):
        halves = append(halves, (xs[c].to(tl.float32) * inverse).to(tl.float16))
    return halves, tl.permute(repeat(peak, BLOCKS), 0, 2, 1)


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
def multiply_tile(
    accs, words, factors, x, exponent, c: tl.constexpr, COUNT: tl.constexpr, KIND: tl.constexpr, BY_TILE: tl.constexpr, ZEROS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Sums [warps, 16, 8] and the products of the c-th tile of each group of lines with `x` [warps, n, 8].

    Codes of 4 bits are SHIFT too large. So their products begin with as many sums of `x` less.
    """
    result = ()
    if KIND == "int4":
        base = tl.dot(tl.full([x.shape[0], 16, x.shape[1]], -SHIFT, x.dtype), x, input_precision=PRECISION)
    for i in tl.static_range(len(accs)):
        tile, more, acc = words[2 * (i * COUNT + c)], words[2 * (i * COUNT + c) + 1], accs[i]
        numbers = sixteen(tile, more, exponent, KIND, x.dtype)
        if KIND == "int4":
            acc += tl.dot(numbers, x, base, input_precision=PRECISION) * factors[(i * COUNT + c) * (1 + ZEROS)][:, :, None]
        elif BY_TILE:
            acc += tl.dot(numbers, x, input_precision=PRECISION) * factors[i * COUNT + c][:, :, None]
        else:
            acc = tl.dot(numbers, x, acc, input_precision=PRECISION)
        if ZEROS:
            acc += base * (factors[2 * (i * COUNT + c) + 1] * (-1 / SHIFT))[:, :, None]
        result = append(result, acc)
    return result


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
def sum_parts(acc, BLOCKS: tl.constexpr, PARTS: tl.constexpr, M: tl.constexpr):
    """Of products [warps, 16, 8] those of a part with itself, added up: [BLOCKS, 16 / PARTS lines, 8 / PARTS tokens]."""
    LINES: tl.constexpr = 16 // PARTS
    TOKENS: tl.constexpr = 8 // PARTS
    line, column = tl.arange(0, 16)[None, :, None], tl.arange(0, 8)[None, None, :]
    token, y = tl.arange(0, TOKENS)[None, None, :], tl.zeros([BLOCKS, LINES, TOKENS], tl.float32)
    for m in tl.static_range(M):
        met = tl.sum(tl.where(line // LINES * TOKENS + m == column, acc, 0.0), 2)  # [warps, 16]
        met = tl.sum(tl.reshape(met, [acc.shape[0], PARTS, LINES]), 1)
        met = tl.sum(tl.reshape(met, [BLOCKS, acc.shape[0] // BLOCKS, LINES]), 1)
        y = tl.where(token == m, met[:, :, None], y)
    return y


@triton.jit
def silu_times(y, DTYPE: tl.constexpr):
    """Lines of gate and then of up, [BLOCKS, 2 ROWS, TOKENS], as silu(gate) * up; both are rounded before they meet."""
    y = tl.reshape(y.to(DTYPE).to(tl.float32), [y.shape[0], 2, y.shape[1] // 2, y.shape[2]])
    gate, up = tl.split(tl.permute(y, 0, 2, 3, 1))
    return (gate / (1.0 + tl.exp(-gate))).to(DTYPE).to(tl.float32) * up


@triton.jit
def finish(
    acc, scale_ptr, residual_ptr, out_ptr, first, num_rows, inverse, GROUP_ROWS: tl.constexpr, BY_TILE: tl.constexpr,
    GATED: tl.constexpr, RESIDUAL: tl.constexpr, M: tl.constexpr, PARTS: tl.constexpr,
    BLOCKS: tl.constexpr,
):  # fmt: skip
    """Outputs from `first` on, from sums [SPLITS, 16, 8] of all inputs with these lines."""
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    LINES: tl.constexpr = 16 // PARTS
    ROWS: tl.constexpr = LINES // (1 + GATED)
    y = sum_parts(acc, BLOCKS, PARTS, M)
    first += tl.arange(0, BLOCKS)[:, None, None] * ROWS
    if not BY_TILE:
        line = row_of(first, tl.arange(0, LINES)[None, :, None], num_rows, ROWS, LINES)
        y *= tl.load(scale_ptr + line // GROUP_ROWS).to(tl.float32)
    y *= inverse
    y = silu_times(y, DTYPE) if GATED else y
    outputs, token = first + tl.arange(0, ROWS)[None, :, None], tl.arange(0, 8 // PARTS)[None, None, :]
    at, kept = token * num_rows + outputs, (outputs < num_rows) & (token < M)
    if RESIDUAL:
        y += tl.load(residual_ptr + at, mask=kept, other=0).to(tl.float32)
    tl.store(out_ptr + at, y.to(DTYPE), mask=kept)


@triton.jit
def few_codes_kernel(
    x_ptr, word_ptr, scale_ptr, zero_ptr, columns_ptr, residual_ptr, out_ptr, ahead_ptr, stride_x, num_rows, eps, exponent,
    ahead_size, ahead_end, K: tl.constexpr, GROUP_ROWS: tl.constexpr, GROUP: tl.constexpr, KIND: tl.constexpr,
    NORM: tl.constexpr, GATED: tl.constexpr, RESIDUAL: tl.constexpr, M: tl.constexpr, PARTS: tl.constexpr,
    SPLITS: tl.constexpr, BLOCKS: tl.constexpr, WORDS: tl.constexpr, TIMES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program p: outputs p * ROWS * TIMES to (p + 1) * ROWS * TIMES of all M tokens, ROWS at a time.

    NORM, GATED and RESIDUAL as in `small_linear_kernel`. GATED: the program's lines are its rows of gate, then those of up.
    GROUP_ROWS outputs and GROUP inputs share a scale; with GROUP = K it is multiplied last, unless there are zeros.
    """
    let_next_start(PDL)
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    PRECISION: tl.constexpr = "ieee" if DTYPE == tl.float32 else "tf32"  # noqa: SIM300
    ROWS: tl.constexpr = 16 // PARTS // (1 + GATED)
    PER_WORD: tl.constexpr = 8 if KIND == "int4" else 4
    NUM: tl.constexpr = K // PER_WORD
    STEP: tl.constexpr = SPLITS * PARTS * WORDS
    COUNT: tl.constexpr = (NUM + STEP - 1) // STEP
    BY_TILE: tl.constexpr = GROUP < K or KIND == "int4"
    HALVES: tl.constexpr = KIND != "int4" and DTYPE != tl.float32  # noqa: SIM300
    first = tl.program_id(0) * (ROWS * BLOCKS * TIMES)
    words, factors, accs, xs = (), (), (), ()
    for i in tl.static_range(TIMES):
        words += load_words(word_ptr, first + i * (ROWS * BLOCKS), num_rows, NUM, ROWS, PARTS, SPLITS, BLOCKS, WORDS)
        accs = append(accs, tl.zeros([BLOCKS * SPLITS, 16, 8], tl.float32))
    for i in tl.static_range(TIMES if BY_TILE else 0):
        factors += load_factors(scale_ptr, zero_ptr, first + i * (ROWS * BLOCKS), num_rows, COUNT, K, GROUP_ROWS, GROUP, ROWS,
                                PARTS, SPLITS, BLOCKS, STEP * PER_WORD)  # fmt: skip
    if ahead_ptr is not None:
        ask_cache(ahead_ptr, ahead_size, ahead_end)
    wait_for_inputs(PDL)
    inverse = inverse_root(x_ptr, stride_x, eps, K, M, 256 * BLOCKS * SPLITS // M)[:, None, :] if NORM else 1.0
    if HALVES:
        for c in tl.static_range(COUNT):
            xs = append(xs, load_tile(x_ptr, columns_ptr, stride_x, c * STEP, NUM, GROUP, KIND, M, PARTS, SPLITS, WORDS))
        xs, peak = as_halves(xs, BLOCKS)
    for c in tl.static_range(COUNT):
        if HALVES:
            x = xs[c]
        else:
            x = load_tile(x_ptr, columns_ptr, stride_x, c * STEP, NUM, GROUP, KIND, M, PARTS, SPLITS, WORDS)
        x = tl.permute(repeat(x, BLOCKS), 0, 2, 1)
        accs = multiply_tile(accs, words, factors, x, exponent, c, COUNT, KIND, BY_TILE, zero_ptr is not None, PRECISION)
    for i in tl.static_range(TIMES):
        acc = accs[i] * peak if HALVES else accs[i]
        finish(acc, scale_ptr, residual_ptr, out_ptr, first + i * (ROWS * BLOCKS), num_rows, inverse, GROUP_ROWS, BY_TILE, GATED,
               RESIDUAL, M, PARTS, BLOCKS)  # fmt: skip


def serves(x: torch.Tensor) -> bool:
    """Whether the device of `x` keeps such a product in registers: compute capability 8.0 or later, or an interpreter."""
    return not x.is_cuda or torch.cuda.get_device_capability(x.device) >= (8, 0)


AHEAD = 16 << 20
REGISTERS = 84  # of codes, in each thread
MAX_WARPS = 16


def tile_of(num_tokens: int, row_bytes: int, group_bytes: int) -> dict[str, int]:
    """PARTS, SPLITS (which are warps) and WORDS of a program, for rows of so many bytes, and groups that share a scale.

    As many parts as leave a column to each token, but four rows. As many warps as REGISTERS asks for; two at least where
    the sums of four tokens take registers too.
    """
    parts = 2 if num_tokens > 2 else 4
    splits = triton.next_power_of_2(triton.cdiv(16 // parts * row_bytes, 4 * 32 * REGISTERS))
    words = min(16, (group_bytes & -group_bytes) // 4)
    return {"PARTS": parts, "SPLITS": min(MAX_WARPS, max(splits, 1 + (num_tokens > 2))), "WORDS": words, "TIMES": 1, "BLOCKS": 1}


def few_codes(
    x: torch.Tensor,
    words: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    block: tuple[int, int],
    kind: str,
    norm_eps: float | None = None,
    gated: bool = False,
    residual: torch.Tensor | None = None,
    columns: torch.Tensor | None = None,
    ahead: torch.Tensor | None = None,
) -> torch.Tensor:
    """`x` [T, K] times the transpose of W [rows, K], for T of 1, 2 or 4; accumulated in float32.

    Args:
        words: [rows, K / 4 or K / 8] int32: codes of 8 bits as they come, of 4 bits in the order of `pack_planes`.
        scales: [rows / block[0], K / block[1]], floats.
        zeros: of codes of 4 bits, as `int4_linear` has them.
        block: outputs and inputs that share a scale. So many inputs are a multiple of 16 (8 bits) or 32 (4 bits).
        kind: "fp8", "fp8_bits" (on a card that has no such numbers), "int8" or "int4".
        norm_eps, gated, residual: as in `small_linear`. Rows of `x` may be apart; nothing else is.
        columns: [K], factors of the (normed) `x`. Their product is rounded to its dtype.
    """
    num_tokens, width = x.shape
    rows = len(words) // (1 + gated)
    out = x.new_empty(num_tokens, rows)
    row_bytes = 4 * words.shape[1]
    has_groups = block[1] < width or kind == "int4"
    tile = tile_of(num_tokens, row_bytes, row_bytes * block[1] // width if has_groups else 64)
    programs = triton.cdiv(rows, 16 // tile["PARTS"] // (1 + gated) * tile["TIMES"] * tile["BLOCKS"])
    end = 0 if ahead is None else min(ahead.nbytes, AHEAD)
    few_codes_kernel[(programs,)](
        x, words, scales, zeros, columns, out if residual is None else residual, out, ahead, x.stride(0), rows,
        norm_eps or 0.0, EXPONENT, triton.cdiv(end, 128 * programs) * 128, end, K=width, GROUP_ROWS=block[0], GROUP=block[1], KIND=kind, NORM=norm_eps is not None, GATED=gated,
        RESIDUAL=residual is not None, M=num_tokens, **tile, num_warps=tile["SPLITS"] * tile["BLOCKS"],
        **launch_options(x.device, num_tokens),
    )  # fmt: skip
    return out
