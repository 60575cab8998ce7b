"""`prefill`: attention of many new tokens a sequence over paged K/V. Scores are never written to memory.

FlashAttention-2 (Dao, 2023, algorithm 1): a program has TILE_M queries of one head, and reads the keys tile by tile. It reads
K/V only from the cache. So a whole prompt, a chunk of one, and the rest after a cached prefix are the same case: the last
`query_len` of `seq_len` tokens are new, and new token i has the position seq_len - query_len + i.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import triton
import triton.language as tl

from folovllm.kernels.fp8_cache import prefill_loop_fp8
from folovllm.kernels.online_softmax import LOG2_E, LOWEST, block_ids, normalize, online_softmax_tile, tile_offsets
from folovllm.kernels.window import first_seen, window_loop
from folovllm.step.kv_format import UNSCALED, KVScales


@triton.jit
def prefill_loop(
    q, row_max, row_sum, acc, k_ptr, v_ptr, table_ptr, positions, first, last, scale,
    MASKED: tl.constexpr, STRIDE_BLOCK: tl.constexpr, STRIDE_TOKEN: tl.constexpr,
    B: tl.constexpr, TILE: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Fold the keys `first` to `last` into the state of queries `q` [M, D] that stand at `positions` [M].

    `k_ptr` and `v_ptr` point to the KV head, `table_ptr` to the sequence's row of the block tables; dimensions are
    contiguous. `first` is a multiple of TILE. With MASKED a query sees the keys up to its own position, and `last` may
    fall inside a tile, past which nothing is read; without, the caller promises that all queries see all these keys,
    and that they fill their tiles. A tile's ids are loaded while the one before it is folded. Returns (row_max, row_sum,
    acc), as `online_softmax_tile` does.
    """
    dims = tl.arange(0, D)
    blocks = block_ids(table_ptr, first, last, B, TILE)
    for token in range(first, last, TILE):
        offsets = tile_offsets(blocks, token, B, TILE, STRIDE_BLOCK, STRIDE_TOKEN)[:, None] + dims[None, :]  # [TILE, D]
        # A tile ahead: were K/V to wait for this load, the compiler could not overlap them with the arithmetic.
        blocks = block_ids(table_ptr, token + TILE, last, B, TILE)
        keys = token + tl.arange(0, TILE)
        if MASKED:
            k = tl.load(k_ptr + offsets, mask=(keys < last)[:, None], other=0.0)
            v = tl.load(v_ptr + offsets, mask=(keys < last)[:, None], other=0.0)
            visible = (keys[None, :] <= positions[:, None]) & (keys < last)[None, :]
        else:
            k = tl.load(k_ptr + offsets)
            v = tl.load(v_ptr + offsets)
            visible = True
        row_max, row_sum, acc = online_softmax_tile(q, k, v, visible, row_max, row_sum, acc, scale)
    return row_max, row_sum, acc


@triton.jit
def tile_of_program(tile_ptr, first_seq, TILE_M: tl.constexpr, LISTED: tl.constexpr):
    """Return the sequence of this program's tile, and the index of the tile's first query among its new tokens.

    LISTED: they are at `tile_ptr` [n, 2]. Otherwise the last tile of a sequence comes first, since it has the most keys. If the
    longest work starts first, no program runs alone at the end.
    """
    if LISTED:
        seq, row0 = tl.load(tile_ptr + 2 * tl.program_id(1)), tl.load(tile_ptr + 2 * tl.program_id(1) + 1)
    else:
        seq, row0 = first_seq + tl.program_id(2), (tl.num_programs(1) - 1 - tl.program_id(1)) * TILE_M
    return seq, row0


@triton.jit(
    do_not_specialize=["stride_table", "first_seq"],
    do_not_specialize_on_alignment=["table_ptr", "start_ptr", "len_ptr", "tile_ptr"],
)
def prefill_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, table_ptr, start_ptr, len_ptr, tile_ptr,
    stride_q, stride_out, stride_table, first_seq, scale, v_scale,
    STRIDE_BLOCK: tl.constexpr, STRIDE_TOKEN: tl.constexpr, STRIDE_HEAD: tl.constexpr,
    B: tl.constexpr, G: tl.constexpr, D: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr, LISTED: tl.constexpr,
    WINDOW: tl.constexpr,
):  # fmt: skip
    """Program: attention of TILE_M queries of one head of one sequence; grid (Hq, tiles of the longest query, sequences).

    LISTED: grid (Hq, n), for the n tiles at `tile_ptr`. WINDOW: the number of keys that a query sees; 0: all.
    """
    loop: tl.constexpr = prefill_loop_fp8 if k_ptr.dtype.element_ty == tl.float8e4nv else prefill_loop
    head = tl.program_id(0)
    seq, row0 = tile_of_program(tile_ptr, first_seq, TILE_M, LISTED)
    start = tl.load(start_ptr + seq)
    query_len = tl.load(start_ptr + seq + 1) - start
    seq_len = tl.load(len_ptr + seq)
    if row0 >= query_len:
        return
    rows = row0 + tl.arange(0, TILE_M)
    dims = tl.arange(0, D)
    inside = (rows < query_len)[:, None]
    token = (start + rows).to(tl.int64)[:, None]
    q = tl.load(q_ptr + token * stride_q + head * D + dims[None, :], mask=inside, other=0.0)  # [TILE_M, D]
    positions = seq_len - query_len + rows  # [TILE_M]
    k_ptr += head // G * STRIDE_HEAD
    v_ptr += head // G * STRIDE_HEAD
    table_ptr += seq.to(tl.int64) * stride_table
    full = (seq_len - query_len + row0 + 1) // TILE_N * TILE_N  # keys in whole tiles that even the first query sees
    last = tl.minimum(seq_len, seq_len - query_len + row0 + TILE_M)  # end of the keys that a query of this tile sees
    if WINDOW:
        row_max, row_sum, acc = window_loop(
            q, k_ptr, v_ptr, table_ptr, positions, first_seen(seq_len - query_len + row0, WINDOW, TILE_N), last, scale,
            WINDOW, STRIDE_BLOCK, STRIDE_TOKEN, B, TILE_N, TILE_M, D)  # fmt: skip
    else:
        row_max, row_sum = tl.full([TILE_M], LOWEST, tl.float32), tl.zeros([TILE_M], tl.float32)
        acc = tl.zeros([TILE_M, D], tl.float32)
        row_max, row_sum, acc = loop(q, row_max, row_sum, acc, k_ptr, v_ptr, table_ptr, positions, 0, full, scale,
                                     False, STRIDE_BLOCK, STRIDE_TOKEN, B, TILE_N, D)  # fmt: skip
        row_max, row_sum, acc = loop(q, row_max, row_sum, acc, k_ptr, v_ptr, table_ptr, positions, full, last, scale,
                                     True, STRIDE_BLOCK, STRIDE_TOKEN, B, TILE_N, D)  # fmt: skip
    out = (normalize(row_sum, acc) * v_scale).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + token * stride_out + head * D + dims[None, :], out, mask=inside)


@dataclass(slots=True, frozen=True)
class PrefillConfig:
    """Tile sizes, and the warps and pipeline stages of a program."""

    tile_m: int
    tile_n: int
    num_warps: int
    num_stages: int


def prefill_config(head_dim: int, itemsize: int, capability: tuple[int, int] | None) -> PrefillConfig:
    """Return the tiles for a card. The queries and `num_stages` tiles of K and V must fit into its shared memory.

    `capability` None is the interpreter, in which a program costs more than its work. Large tiles of wide heads were
    measured on Hopper alone.
    """
    if capability is None:
        return PrefillConfig(32, 32, 4, 1)
    row_bytes = itemsize * head_dim
    if capability < (8, 0):
        return PrefillConfig(32, 32, 4, 1) if row_bytes <= 256 else PrefillConfig(16, 16, 4, 1)
    if row_bytes <= 256:
        return PrefillConfig(128, 64, 8, 3 if capability >= (9, 0) else 2)
    fits_large_tiles = capability == (9, 0) and itemsize == 2 and head_dim <= 256
    return PrefillConfig(128, 64, 8, 2) if fits_large_tiles else PrefillConfig(64, 32, 4, 2)


def config_on(device: torch.device, head_dim: int, itemsize: int) -> PrefillConfig:
    """Return the tiles for a device."""
    return prefill_config(
        head_dim, itemsize, torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    )


class PrefillKernel(Protocol):
    """Causal attention of a ragged batch of new tokens over their sequences' blocks, grouped heads included."""

    def __call__(
        self,
        query: torch.Tensor,  # [T, Hq, D]; the heads of a token are contiguous
        kv_cache: torch.Tensor,  # [2, N, B, Hkv, D], any strides but D contiguous; holds the new tokens' K/V already
        query_start_loc: torch.Tensor,  # [S+1] int32: where the new tokens of each sequence start in `query`
        seq_lens: torch.Tensor,  # [S] int32: all tokens of each sequence, the new ones included
        block_tables: torch.Tensor,  # [S, max_blocks] int32: arbitrary beyond a sequence's own blocks
        max_query_len: int,  # at least the longest sequence's number of new tokens
        scale: float,  # the factor on the scores, 1 / sqrt(D)
        out: torch.Tensor,  # [T, Hq, D] to write to; rows of sequences before `first_seq` stay as they are
        first_seq: int = 0,  # the first sequence to compute; those before it are decodes, which another kernel serves
    ) -> torch.Tensor:
        """Query head h reads KV head h // (Hq / Hkv). The sums are float32, whatever the dtype. Returns `out`."""


def prefill(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_tables: torch.Tensor,
    max_query_len: int,
    scale: float,
    out: torch.Tensor | None = None,
    first_seq: int = 0,
    config: PrefillConfig | None = None,
    tiles: torch.Tensor | None = None,
    scales: KVScales = UNSCALED,
    window: int | None = None,
) -> torch.Tensor:
    """Causal attention of a ragged batch of queries over their sequences' blocks, GQA included.

    Args:
        query: [T, Hq, D]; each token's heads contiguous.
        kv_cache: [2, N, B, Hkv, D], any strides but D contiguous; holds the new tokens' K/V already.
        query_start_loc: [S+1] int32, where each sequence's new tokens start in `query`.
        seq_lens: [S] int32, all tokens, new ones included.
        block_tables: [S, max_blocks] int32.
        max_query_len: at least the longest query; a larger value costs empty programs only.
        out: [T, Hq, D] to write to; rows of sequences before `first_seq` stay as they are.
        first_seq: the first sequence to compute (those before it are decodes).
        tiles: [n, 2] int32, the work list of a captured step (`list_tiles`).
        scales: of K and V in the cache.
        window: how many tokens a token sees, itself included; None: all before it.
    """
    out = torch.empty_like(query, memory_format=torch.contiguous_format) if out is None else out
    num_seqs = seq_lens.shape[0] - first_seq
    if num_seqs <= 0 or max_query_len <= 0:
        return out
    (_, _, block_size, num_kv_heads, head_dim), num_heads = kv_cache.shape, query.shape[1]
    config = config or config_on(query.device, head_dim, query.element_size())
    k_cache, v_cache = kv_cache.unbind(0)
    stride_block, stride_token, stride_head, _ = k_cache.stride()
    grid = (triton.cdiv(max_query_len, config.tile_m), num_seqs) if tiles is None else (len(tiles), 1)
    prefill_kernel[(num_heads, *grid)](
        query, k_cache, v_cache, out, block_tables, query_start_loc, seq_lens, seq_lens if tiles is None else tiles,
        query.stride(0), out.stride(0), block_tables.stride(0), first_seq, scale * scales.key * LOG2_E, scales.value,
        STRIDE_BLOCK=stride_block, STRIDE_TOKEN=stride_token, STRIDE_HEAD=stride_head,
        B=block_size, G=num_heads // num_kv_heads, D=head_dim, TILE_M=config.tile_m, TILE_N=config.tile_n,
        LISTED=tiles is not None, WINDOW=window or 0, num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    return out
