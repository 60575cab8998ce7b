"""Split-K sums: several programs share a tile of outputs, because a few tiles would leave most of a GPU idle.

Each program sums a part of the inputs. The program that finishes last adds all parts, always in the same order. So the same
inputs have the same sum in every run.
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
    """Store a tile `acc` [BN, BM] of `out` [num_tokens, OUTPUTS], plus the residual if there is one.

    SPLIT: the program that finishes last stores the sum of all parts. Program (q, p, s) has part s of tile p of outputs and tile
    q of tokens, so those of the same weights run side by side. `part_ptr` [num_parts, num_tokens, OUTPUTS] holds the parts. `done_ptr`, zero before and after, counts the finished
    parts of each tile. OUTPUTS is a constant, so addresses differ by constants and take one register instead of a hundred.
    """
    row, token = tl.arange(0, acc.shape[0])[:, None], tl.arange(0, acc.shape[1])[None, :]
    first_row, first_token = tl.program_id(1) * acc.shape[0], tl.program_id(0) * acc.shape[1]
    first, size = first_token.to(tl.int64) * OUTPUTS + first_row, num_tokens.to(tl.int64) * OUTPUTS
    at, kept = token.to(tl.int64) * OUTPUTS + row, (token < num_tokens - first_token) & (row < OUTPUTS - first_row)
    if SPLIT:
        part_ptr += first
        done_ptr += tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        tl.store(part_ptr + tl.program_id(2) * size + at, acc, mask=kept)
        tl.debug_barrier()  # all threads have stored before one of them counts the part
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
    """Add the residual to a complete tile, and store it."""
    if RESIDUAL:
        acc += tl.load(residual_ptr + at, mask=kept, other=0).to(tl.float32)
    tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=kept)


def num_parts(tiles: int, programs: int, most: int) -> int:
    """Return how many programs share a tile, at most `most`, so that there are about `programs` in all."""
    return max(1, min(most, programs // max(1, tiles)))


def token_tiles(num_tokens: int, size: int) -> int:
    """Return the number of tiles of `size` tokens, rounded down to a power of two, so that the warm-up compiles every variant."""
    return 1 << (triton.cdiv(num_tokens, size).bit_length() - 1)


@cache
def counters(device: torch.device) -> torch.Tensor:
    """Return the device's counters, [MOST_TILES] zeros. All products share them: they run on one stream, and leave zeros."""
    return torch.zeros(MOST_TILES, dtype=torch.int32, device=device)


def parts_for(x: torch.Tensor, out: torch.Tensor, parts: int) -> torch.Tensor:
    """Return a buffer for parts, [parts, *out.shape] float32. With one part it is `out`, which is then not read."""
    return out if parts == 1 else x.new_empty(parts, *out.shape, dtype=torch.float32)
