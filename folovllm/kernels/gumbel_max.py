"""One-pass sampling: the next token of every row from the logits, with no softmax and no sort.

argmax(logits / temperature + Gumbel noise) is a sample from the softmax (`folovllm/sample/noise.py` defines the noise). There are
two launches: first each program finds the best token of a tile of a row, then the best tokens of a row are compared.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

TILE = 4096  # tokens of a program; a multiple of 4, because a Philox block has four numbers


@triton.jit
def philox(block, position, seed_low, seed_high):
    """Return the four words of Philox blocks (`folovllm/sample/noise.py`), [...] uint32 each.

    A 64-bit product gives both its halves with one instruction.
    """
    c0 = block.to(tl.uint32)
    c1, c2, c3 = c0 * 0 + position.to(tl.uint32), c0 * 0, c0 * 0
    k0, k1 = seed_low.to(tl.uint32, bitcast=True), seed_high.to(tl.uint32, bitcast=True)
    for _ in tl.static_range(10):
        p0, p1 = c0.to(tl.uint64) * 0xD2511F53, c2.to(tl.uint64) * 0xCD9E8D57
        c0, c2 = (p1 >> 32).to(tl.uint32) ^ c1 ^ k0, (p0 >> 32).to(tl.uint32) ^ c3 ^ k1
        c1, c3 = p1.to(tl.uint32), p0.to(tl.uint32)
        k0, k1 = (k0 + 0x9E3779B9).to(tl.uint32), (k1 + 0xBB67AE85).to(tl.uint32)
    return c0, c1, c2, c3


@triton.jit
def negative_log(u, FAST: tl.constexpr):
    """Return -log(u) for 0 < u < 1: [...] float32.

    FAST uses the hardware's logarithm, whose error is absolute. Near 1 that error is too large, so there it uses four terms of the
    series in 1 - u (an exact difference). Relative errors stay below 1e-5, with a fifth of the instructions.
    """
    if FAST:
        v = 1.0 - u
        series = v * (1.0 + v * (0.5 + v * (0.33333334 + v * 0.25)))
        return tl.where(v < 0.015625, series, -libdevice.fast_logf(u))
    return -tl.log(u)


@triton.jit
def gumbel(words, FAST: tl.constexpr):
    """Return the noise that 32 random bits give: float32, in the shape of `words`."""
    exponential = negative_log(((words >> 9).to(tl.float32) + 0.5) * (1.0 / (1 << 23)), FAST)
    return -libdevice.fast_logf(exponential) if FAST else -tl.log(exponential)


@triton.jit
def gumbel_noise(seed_low, seed_high, position, first_id, WIDTH: tl.constexpr, FAST: tl.constexpr):
    """Return the noise of token ids `first_id` to `first_id + WIDTH` (a multiple of 4 each): [WIDTH / 4, 4] float32.

    Token id v takes output v % 4 of the Philox block with counter (v // 4, position, 0, 0) under the seed's two words.
    Blocks are rows, so a thread has all four outputs of a block, and threads exchange nothing.
    """
    c0, c1, c2, c3 = philox(first_id // 4 + tl.arange(0, WIDTH // 4), position, seed_low, seed_high)
    return gumbel(tl.reshape(tl.join(tl.join(c0, c2), tl.join(c1, c3)), [WIDTH // 4, 4]), FAST)


@triton.jit
def gumbel_max_tile(
    logits_ptr, temperature, seed_low, seed_high, position, first, vocab_size, offset, WIDTH: tl.constexpr,
    FAST: tl.constexpr,
):  # fmt: skip
    """The best of WIDTH tokens of one row from `first` on: (value in float32, index in the row).

    With temperature 0 the value is the logit itself; else logit / temperature + noise of token id `offset + index`.
    `gumbel_noise` is laid out [WIDTH / 4, 4], four consecutive ids a row; FAST is passed on to it. Ties go to the lowest
    index; indices from `vocab_size` on count as -inf. NaN is never the best: where there is nothing else, the index is
    one from `vocab_size` on, by which the caller knows.
    """
    index = first + tl.arange(0, WIDTH // 4)[:, None] * 4 + tl.arange(0, 4)[None, :]  # [WIDTH / 4, 4]
    value = tl.load(logits_ptr + index, mask=index < vocab_size, other=float("-inf")).to(tl.float32)
    if temperature > 0:
        value = value / temperature + gumbel_noise(seed_low, seed_high, position, offset + first, WIDTH, FAST)
        value = tl.where(index < vocab_size, value, float("-inf"))
    best = tl.max(value)
    return best, tl.min(tl.where(value == best, index, 0x7FFFFFFF))


@triton.jit(
    do_not_specialize=["vocab_size", "offset"],
    do_not_specialize_on_alignment=["temperature_ptr", "seed_low_ptr", "seed_high_ptr", "position_ptr"],
)
def gumbel_max_kernel(
    logits_ptr, temperature_ptr, seed_low_ptr, seed_high_ptr, position_ptr, best_ptr, at_ptr, stride_logits,
    vocab_size, offset, WIDTH: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Program (row, tile): writes the value and id of the best token of its tile to `best_ptr` and `at_ptr` [S, tiles].

    A tile of NaN alone counts as -inf, with its first id. So the result is always a valid token, which the next step can look up.
    """
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first = tile * WIDTH
    best, at = gumbel_max_tile(
        logits_ptr + row * stride_logits, tl.load(temperature_ptr + row), tl.load(seed_low_ptr + row),
        tl.load(seed_high_ptr + row), tl.load(position_ptr + row), first, vocab_size, offset, WIDTH, FAST,
    )  # fmt: skip
    found = at < vocab_size
    best, at = tl.where(found, best, float("-inf")), tl.where(found, at, first)
    out = row * tl.num_programs(1) + tile
    tl.store(best_ptr + out, best)
    tl.store(at_ptr + out, offset + at)


@triton.jit(do_not_specialize=["num_tiles"], do_not_specialize_on_alignment=["row_ptr"])
def best_of_tiles_kernel(
    best_ptr, at_ptr, token_ptr, row_ptr, last_token_ptr, num_tiles, WIDTH: tl.constexpr, KEEP: tl.constexpr
):
    """Program (row): writes the best token over all tiles; of equal ones the lowest id.

    KEEP: it also writes the token to the row's entry (`row_ptr`) of `last_token_ptr`.
    """
    row = tl.program_id(0).to(tl.int64)
    tile = tl.arange(0, WIDTH)
    best = tl.load(best_ptr + row * num_tiles + tile, mask=tile < num_tiles, other=float("-inf"))
    at = tl.load(at_ptr + row * num_tiles + tile, mask=tile < num_tiles, other=0x7FFFFFFF)
    winners = tl.where(best == tl.max(best, 0), at, 0x7FFFFFFF)
    token = tl.min(winners, 0).to(tl.int64)
    tl.store(token_ptr + row, token)
    if KEEP:
        tl.store(last_token_ptr + tl.load(row_ptr + row), token)


def gumbel_max(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    seed_low: torch.Tensor,
    seed_high: torch.Tensor,
    positions: torch.Tensor,
    offset: int = 0,
    out: torch.Tensor | None = None,
    keep: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """Sample a token for every row.

    Args:
        logits: [S, V], any float dtype, rows contiguous.
        temperature: [S] float32; 0 is greedy.
        seed_low: [S] int32, `seed_high` [S] int32: the two words of each row's seed.
        positions: [S] int32, index of the token to sample in its sequence.
        offset: token id of column 0, a multiple of 4 (a rank's share of the vocabulary).
        out: [at least S] int64, receives the tokens.
        keep: `last_token` int64 and `rows` [S] int32: `last_token[rows]` receives the tokens too.

    Returns:
        [S] int64.
    """
    best, at = tile_bests(logits, temperature, seed_low, seed_high, positions, offset)
    return best_of_tiles(best, at, out, keep)


def tile_bests(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    seed_low: torch.Tensor,
    seed_high: torch.Tensor,
    positions: torch.Tensor,
    offset: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the first launch. Returns the best token of each tile: values [S, tiles] float32 and token ids [S, tiles] int32."""
    num_rows, vocab_size = logits.shape
    num_tiles = triton.cdiv(vocab_size, TILE)
    best = torch.empty(num_rows, num_tiles, dtype=torch.float32, device=logits.device)
    at = torch.empty(num_rows, num_tiles, dtype=torch.int32, device=logits.device)
    gumbel_max_kernel[(num_rows, num_tiles)](
        logits, temperature, seed_low, seed_high, positions, best, at, logits.stride(0), vocab_size, offset, WIDTH=TILE,
        FAST=not triton.knobs.runtime.interpret, num_warps=8,
    )  # fmt: skip
    return best, at


def best_of_tiles(
    best: torch.Tensor,
    at: torch.Tensor,
    out: torch.Tensor | None = None,
    keep: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """Run the second launch: [S, tiles] twice -> [S] int64. `out` and `keep` are those of `gumbel_max`."""
    num_rows, num_tiles = best.shape
    tokens = torch.empty(num_rows, dtype=torch.int64, device=best.device) if out is None else out[:num_rows]
    last_token, rows = keep or (tokens, at)
    best_of_tiles_kernel[(num_rows,)](
        best, at, tokens, rows, last_token, num_tiles, WIDTH=triton.next_power_of_2(num_tiles),
        KEEP=keep is not None, num_warps=1,
    )  # fmt: skip
    return tokens
