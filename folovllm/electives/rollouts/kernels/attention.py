"""`invariant_attention`: one kernel for prefill and decode, whose sums over a context are always split at the same places.

The context of a sequence is read in tiles that are counted from its first position. No tile is divided among programs. The rows
of a program are neighbouring tokens of a sequence, for all query heads that share a KV head; a decode fills one token's rows.
All tiles are masked, even those that every row sees: without a mask the compiler fuses the scale into another operation, which
rounds differently, and which tiles all rows see depends on the chunk. A tile that a row does not see changes nothing in it.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl

from folovllm.kernels.online_softmax import LOG2_E, LOWEST, normalize
from folovllm.kernels.prefill import PrefillConfig, config_on, prefill_loop, tile_of_program

ROWS = 64  # of a program: tokens times heads


@triton.jit(
    do_not_specialize=["stride_table"], do_not_specialize_on_alignment=["table_ptr", "start_ptr", "len_ptr", "tile_ptr"]
)
def invariant_attention_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, table_ptr, start_ptr, len_ptr, tile_ptr, stride_q, stride_out, stride_table, scale,
    STRIDE_BLOCK: tl.constexpr, STRIDE_TOKEN: tl.constexpr, STRIDE_HEAD: tl.constexpr,
    B: tl.constexpr, G: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, QUERIES: tl.constexpr, CONTEXT: tl.constexpr,
):  # fmt: skip
    """Program (KV head, tile at `tile_ptr`): attention of QUERIES tokens of one sequence, in the G heads of the KV head.

    GROUP is the power of two from G up. Rows are tokens times heads: row r is head r % GROUP of token r // GROUP.
    """
    head = tl.program_id(0)
    seq, first = tile_of_program(tile_ptr, 0, QUERIES, True)
    start = tl.load(start_ptr + seq)
    query_len = tl.load(start_ptr + seq + 1) - start
    seq_len = tl.load(len_ptr + seq)
    if first >= query_len:
        return
    row, dims = tl.arange(0, QUERIES * GROUP), tl.arange(0, D)[None, :]
    token, g = first + row // GROUP, row % GROUP
    is_real = ((token < query_len) & (g < G))[:, None]
    index = (start + token).to(tl.int64)[:, None]  # in the step
    within = (head * G + g)[:, None] * D + dims
    q = tl.load(q_ptr + index * stride_q + within, mask=is_real, other=0.0)  # [QUERIES * GROUP, D]
    num_computed = seq_len - query_len
    row_max, row_sum = tl.full([QUERIES * GROUP], LOWEST, tl.float32), tl.zeros([QUERIES * GROUP], tl.float32)
    acc = tl.zeros([QUERIES * GROUP, D], tl.float32)
    row_max, row_sum, acc = prefill_loop(
        q, row_max, row_sum, acc, k_ptr + head * STRIDE_HEAD, v_ptr + head * STRIDE_HEAD,
        table_ptr + seq.to(tl.int64) * stride_table, num_computed + token, 0, tl.minimum(seq_len, num_computed + first + QUERIES),
        scale, True, STRIDE_BLOCK, STRIDE_TOKEN, B, CONTEXT, D)  # fmt: skip
    out = normalize(row_sum, acc).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + index * stride_out + within, out, mask=is_real)


def attention_tile(device: torch.device, head_dim: int, itemsize: int) -> PrefillConfig:
    """Return the tile of a program on this device: rows and positions of the context. It must not depend on the batch."""
    usual = config_on(device, head_dim, itemsize)
    return replace(usual, tile_m=min(ROWS, usual.tile_m), tile_n=min(8192 // head_dim, usual.tile_n), num_warps=4)


def tokens_of_tile(num_heads: int, num_kv_heads: int, rows: int) -> int:
    """Return how many tokens of a sequence fill `rows` rows, each with the query heads of one KV head; at least one."""
    return max(1, rows // triton.next_power_of_2(num_heads // num_kv_heads))


def invariant_attention(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_tables: torch.Tensor,
    tiles: torch.Tensor,
    scale: float,
    config: PrefillConfig,
) -> torch.Tensor:
    """Causal attention of a ragged batch of queries over their sequences' blocks, decodes and prompts alike: [T, Hq, D].

    Args:
        query: [T, Hq, D]; each token's heads contiguous.
        kv_cache: [2, N, B, Hkv, D], any strides but D contiguous; holds the new tokens' K/V already.
        query_start_loc: [S+1] int32. seq_lens: [S] int32, all tokens, new ones included. block_tables: [S, max_blocks] int32.
        tiles: [n, 2] int32 of all sequences (`list_tiles`), each of `tokens_of_tile` tokens. Tokens of no tile get no result.
        scale: the factor on the scores, 1 / sqrt(D). config: `attention_tile`.
    """
    (_, _, block_size, num_kv_heads, head_dim), num_heads = kv_cache.shape, query.shape[1]
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    k_cache, v_cache = kv_cache.unbind(0)
    stride_block, stride_token, stride_head, _ = k_cache.stride()
    invariant_attention_kernel[(num_kv_heads, len(tiles))](
        query, k_cache, v_cache, out, block_tables, query_start_loc, seq_lens, tiles, query.stride(0), out.stride(0),
        block_tables.stride(0), scale * LOG2_E,
        STRIDE_BLOCK=stride_block, STRIDE_TOKEN=stride_token, STRIDE_HEAD=stride_head, B=block_size,
        G=num_heads // num_kv_heads, GROUP=triton.next_power_of_2(num_heads // num_kv_heads), D=head_dim,
        QUERIES=tokens_of_tile(num_heads, num_kv_heads, config.tile_m), CONTEXT=config.tile_n,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    return out
