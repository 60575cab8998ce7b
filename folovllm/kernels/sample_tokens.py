"""Samples any row in a captured step: plain rows like `gumbel_max`, others with their penalties, masks and filters."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from folovllm.kernels.filter_logits import (
    SEED_HIGH,
    SEED_LOW,
    TEMPERATURE,
    VIEWS,
    FilterWorkspace,
    divide,
    filter_logits,
    scan_grid,
)
from folovllm.kernels.gumbel_max import TILE, best_of_tiles, gumbel_max_tile, gumbel_noise
from folovllm.kernels.penalties import FILTERS, FLAGS, NUM_FIELDS, StepRows, adjusted_logits, float_field

MAX_REGISTERS = 64  # of a thread in `plain_kernel`, so that an SM holds four programs


@triton.jit
def special_tile(row, threshold, last, first, WIDTH: tl.constexpr, FAST: tl.constexpr):
    """Return the best kept token of a tile, like `gumbel_max_tile`: (value, index). If none is kept the value is -inf."""
    index = first + tl.arange(0, WIDTH // 4)[:, None] * 4 + tl.arange(0, 4)[None, :]  # [WIDTH / 4, 4]
    value, field_ptr, position = adjusted_logits(row, index), row[3], row[4]
    temperature = float_field(field_ptr, TEMPERATURE)
    if temperature > 0:
        value = divide(value, temperature)
        value = tl.where((value > threshold) | ((value == threshold) & (index <= last)), value, float("-inf"))
        if tl.max(value) > float("-inf"):
            low, high = tl.load(field_ptr + SEED_LOW), tl.load(field_ptr + SEED_HIGH)
            value += gumbel_noise(low, high, position, first, WIDTH, FAST)
    best = tl.max(value)
    return best, tl.min(tl.where(value == best, index, 0x7FFFFFFF))


@triton.jit(do_not_specialize_on_alignment=["row_ptr", "position_ptr"])
def plain_kernel(
    logits_ptr, field_ptr, row_ptr, position_ptr, best_ptr, at_ptr, stride_logits, vocab_size, WIDTH: tl.constexpr,
    FAST: tl.constexpr,
):  # fmt: skip
    """Program (sequence, tile): `gumbel_max_kernel` for rows with neither filters nor words."""
    s, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    field_ptr += tl.load(row_ptr + s).to(tl.int64) * NUM_FIELDS
    if tl.load(field_ptr + FLAGS) != 0:
        return
    first, out = tile * WIDTH, s * tl.num_programs(1) + tile
    best, at = gumbel_max_tile(
        logits_ptr + s * stride_logits, float_field(field_ptr, TEMPERATURE), tl.load(field_ptr + SEED_LOW),
        tl.load(field_ptr + SEED_HIGH), tl.load(position_ptr + s), first, vocab_size, 0, WIDTH, FAST,
    )  # fmt: skip
    found = at < vocab_size
    tl.store(best_ptr + out, tl.where(found, best, float("-inf")))
    tl.store(at_ptr + out, tl.where(found, at, first))


@triton.jit(do_not_specialize=["num_tiles"], do_not_specialize_on_alignment=VIEWS)
def special_kernel(
    logits_ptr, field_ptr, line_ptr, mask_ptr, row_ptr, position_ptr, threshold_ptr, last_ptr, sampled_ptr,
    best_ptr, at_ptr, stride_logits, stride_lines, stride_masks, vocab_size, num_tiles, WIDTH: tl.constexpr,
    FAST: tl.constexpr,
):  # fmt: skip
    """Program (sequence, part): tiles as in `scan_kernel`, for rows with filters or words.

    Tokens that `filter_logits` has sampled already are passed on.
    """
    s = tl.program_id(0).to(tl.int64)
    row_index = tl.load(row_ptr + s).to(tl.int64)
    field_ptr += row_index * NUM_FIELDS
    flags = tl.load(field_ptr + FLAGS)
    if flags == 0:
        return
    row = (
        logits_ptr + s * stride_logits, line_ptr + row_index * stride_lines, mask_ptr + s * stride_masks, field_ptr,
        tl.load(position_ptr + s), vocab_size,
    )  # fmt: skip
    filtered = (flags & FILTERS) != 0
    threshold = tl.load(threshold_ptr + s, mask=filtered, other=float("-inf"))
    last = tl.load(last_ptr + s, mask=filtered, other=0x7FFFFFFF)
    sampled = tl.load(sampled_ptr + s, mask=filtered, other=-1)
    for tile in range(tl.program_id(1), num_tiles, tl.num_programs(1)):
        best, at = 0.0, sampled
        if sampled < 0:
            best, at = special_tile(row, threshold, last, tile * WIDTH, WIDTH, FAST)
        tl.store(best_ptr + s * num_tiles + tile, best)
        tl.store(at_ptr + s * num_tiles + tile, at)


def sample_tokens(
    logits: torch.Tensor,
    step: StepRows,
    work: FilterWorkspace,
    out: torch.Tensor | None = None,
    keep: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """Sample a token for every sequence, with its row's filters, penalties and masks. The logits are not changed.

    Args:
        logits: [S, V], any float dtype, rows contiguous.
        out: [at least S] int64, receives the tokens. keep: (`last_token`, `rows`): `last_token[rows]` receives the tokens too.

    Returns:
        [S] int64.
    """
    num_seqs, vocab_size = logits.shape
    filter_logits(logits, step, work)
    num_tiles = triton.cdiv(vocab_size, TILE)
    best = torch.empty(num_seqs, num_tiles, dtype=torch.float32, device=logits.device)
    at = torch.empty(num_seqs, num_tiles, dtype=torch.int32, device=logits.device)
    fast = not triton.knobs.runtime.interpret
    plain_kernel[(num_seqs, num_tiles)](
        logits, step.fields, step.rows, step.positions, best, at, logits.stride(0), vocab_size, WIDTH=TILE, FAST=fast,
        num_warps=8, maxnreg=MAX_REGISTERS,
    )  # fmt: skip
    special_kernel[scan_grid(num_seqs, vocab_size)](
        logits, *step, work.threshold, work.last, work.tokens, best, at, logits.stride(0), *step.strides, vocab_size,
        num_tiles, WIDTH=TILE, FAST=fast, num_warps=8,
    )  # fmt: skip
    return best_of_tiles(best, at, out, keep)
