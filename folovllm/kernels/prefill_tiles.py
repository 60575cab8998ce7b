"""The work list of a prefill in a captured step, written on the device.

A captured step holds many short prompts, or one long prompt. With a program for each possible tile of each prompt, thousands of
programs would have no work. The list has the tiles of all prompts end to end, so it is as long as their largest total number.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

NOTHING = tl.constexpr(0x7FFFFFFF)  # the first query of an unused entry


@triton.jit(do_not_specialize=["first_seq", "num_tiles"], do_not_specialize_on_alignment=["start_ptr", "len_ptr"])
def list_tiles_kernel(start_ptr, len_ptr, tile_ptr, first_seq, num_tiles, TILE_M: tl.constexpr, WIDTH: tl.constexpr):
    """Program (sequence after `first_seq`): writes (sequence, first query) of its tiles, the last tile, with most keys, first.

    A sequence of length 0 has no tiles. The last program fills the list up to `num_tiles` with NOTHING for the first query.
    """
    seq, i = tl.program_id(0), tl.arange(0, WIDTH)
    start_ptr += first_seq
    len_ptr += first_seq
    before = 0
    for first in range(0, seq, WIDTH):
        s = first + i
        new = tl.load(start_ptr + s + 1, mask=s < seq, other=0) - tl.load(start_ptr + s, mask=s < seq, other=0)
        real = tl.minimum(new, tl.load(len_ptr + s, mask=s < seq, other=0))
        before += tl.sum(tl.cdiv(real, TILE_M))
    new = tl.load(start_ptr + seq + 1) - tl.load(start_ptr + seq)
    mine = tl.cdiv(tl.minimum(new, tl.load(len_ptr + seq)), TILE_M)
    end = mine
    if seq == tl.num_programs(0) - 1:
        end = num_tiles - before
    for first in range(0, end, WIDTH):
        t = first + i
        inside = t < end
        tl.store(tile_ptr + 2 * (before + t), first_seq + seq, mask=inside)
        tl.store(tile_ptr + 2 * (before + t) + 1, tl.where(t < mine, (mine - 1 - t) * TILE_M, NOTHING), mask=inside)


def list_tiles(
    query_start_loc: torch.Tensor, seq_lens: torch.Tensor, num_tokens: int, first_seq: int, tile_m: int
) -> torch.Tensor:
    """Return the tiles of `tile_m` queries of the sequences from `first_seq` on, [n, 2] int32: sequence and first query.

    Args:
        query_start_loc: [S+1] int32. seq_lens: [S] int32; the new tokens of a sequence of length 0 are padding.
        num_tokens: at least the new tokens of these sequences. It and S bound the number of tiles.
    """
    num_seqs = len(seq_lens) - first_seq
    num_tiles = (num_tokens + num_seqs * (tile_m - 1)) // tile_m
    tiles = torch.empty(num_tiles, 2, dtype=torch.int32, device=seq_lens.device)
    list_tiles_kernel[(num_seqs,)](
        query_start_loc, seq_lens, tiles, first_seq, num_tiles, TILE_M=tile_m, WIDTH=32, num_warps=1
    )
    return tiles
