"""Sums that several programs share: few tiles of outputs would leave most of a GPU idle.

Each program adds up a part of the inputs. Whoever brings the last part adds all of them, always in the same order, so that
the same numbers have the same sum in every run.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

MOST_TILES = 1 << 16  # of one product


@triton.jit
def store_sum(
    acc, part_ptr, done_ptr, residual_ptr, out_ptr, num_tokens, num_parts, OUTPUTS: tl.constexpr, SPLIT: tl.constexpr,
    RESIDUAL: tl.constexpr,
):  # fmt: skip
    """Store a tile `acc` [BN, BM] of `out` [num_tokens, OUTPUTS], with the residual that is there; SPLIT: once all its parts
    are there. Program (p, q, s) has part s of tile p of outputs, q of tokens.

    `part_ptr` takes `num_parts` of `out`. `done_ptr`, zero before and after, counts the parts of each tile. OUTPUTS is a
    constant because then places differ by constants, and take one register instead of a hundred.
    """
    row, token = tl.arange(0, acc.shape[0])[:, None], tl.arange(0, acc.shape[1])[None, :]
    first_row, first_token = tl.program_id(0) * acc.shape[0], tl.program_id(1) * acc.shape[1]
    first, size = first_token.to(tl.int64) * OUTPUTS + first_row, num_tokens.to(tl.int64) * OUTPUTS
    at, kept = token.to(tl.int64) * OUTPUTS + row, (token < num_tokens - first_token) & (row < OUTPUTS - first_row)
    if SPLIT:
        part_ptr += first
        done_ptr += tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
        tl.store(part_ptr + tl.program_id(2) * size + at, acc, mask=kept)
        tl.debug_barrier()  # all threads have stored before one of them says so
        if tl.atomic_add(done_ptr, 1, sem="acq_rel") == num_parts - 1:
            tl.store(done_ptr, 0)
            total = tl.zeros(acc.shape, tl.float32)
            for part in range(num_parts):
                total += tl.load(part_ptr + part * size + at, mask=kept, other=0)
            store_tile(total, residual_ptr + first, out_ptr + first, at, kept, RESIDUAL)
    else:
        store_tile(acc, residual_ptr + first, out_ptr + first, at, kept, RESIDUAL)


@triton.jit
def store_tile(acc, residual_ptr, out_ptr, at, kept, RESIDUAL: tl.constexpr):
    """Store a tile that is complete, but for the residual."""
    if RESIDUAL:
        acc += tl.load(residual_ptr + at, mask=kept, other=0).to(tl.float32)
    tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=kept)


def num_parts(tiles: int, programs: int, most: int) -> int:
    """How many programs share a tile, at most `most`, so that there are about `programs`."""
    return max(1, min(most, programs // max(1, tiles)))


def token_tiles(num_tokens: int, size: int) -> int:
    """Tiles of `size` tokens, rounded down to a power of two: that the start meets every variant (`warm_up.small_steps`)."""
    return 1 << (triton.cdiv(num_tokens, size).bit_length() - 1)


@cache
def counters(device: torch.device) -> torch.Tensor:
    """[MOST_TILES] zeros. All work of a device is queued on one stream, and each product leaves zeros."""
    return torch.zeros(MOST_TILES, dtype=torch.int32, device=device)


def parts_for(x: torch.Tensor, out: torch.Tensor, parts: int) -> torch.Tensor:
    """[parts, *out.shape] float32; `out` itself where there is one, for then nothing is read."""
    return out if parts == 1 else x.new_empty(parts, *out.shape, dtype=torch.float32)
