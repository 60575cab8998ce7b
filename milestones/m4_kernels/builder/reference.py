"""A prefill kernel that reads K and V once for all query heads that share them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

LOG2_E = 1.4426950408889634
ROWS, KEYS = 32, 32  # of a tile: rows are (token, head of the group) pairs


@triton.jit
def prefill_kernel(
    q_ptr, kv_ptr, out_ptr, start_ptr, len_ptr, table_ptr, stride_q, stride_out, stride_v, stride_block, stride_token,
    stride_head, stride_table, first_seq, scale,
    B: tl.constexpr, G: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """ROWS rows of one KV head of one sequence; row r is new token r // G with query head r % G of the group."""
    kv_head, seq = tl.program_id(0), first_seq + tl.program_id(2)
    start, seq_len = tl.load(start_ptr + seq), tl.load(len_ptr + seq)
    query_len = tl.load(start_ptr + seq + 1) - start
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    if tl.program_id(1) * ROWS >= query_len * G:
        return
    token, head, dims = rows // G, kv_head * G + rows % G, tl.arange(0, D)
    inside = (token < query_len)[:, None]
    place = (start + token).to(tl.int64)[:, None]
    q = tl.load(q_ptr + place * stride_q + head[:, None] * D + dims[None, :], mask=inside, other=0.0)  # [ROWS, D]
    position = seq_len - query_len + token  # [ROWS]
    last = tl.minimum(seq_len, seq_len - query_len + (tl.program_id(1) * ROWS + ROWS - 1) // G + 1)

    row_max = tl.full([ROWS], -1.0e30, tl.float32)
    row_sum = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, D], tl.float32)
    for first in range(0, last, KEYS):
        keys = first + tl.arange(0, KEYS)
        there = keys < last
        block = tl.load(table_ptr + seq.to(tl.int64) * stride_table + keys // B, mask=there, other=0).to(tl.int64)
        offset = (block * stride_block + keys % B * stride_token + kv_head * stride_head)[:, None] + dims[None, :]
        k = tl.load(kv_ptr + offset, mask=there[:, None], other=0.0)  # [KEYS, D]
        v = tl.load(kv_ptr + stride_v + offset, mask=there[:, None], other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        scores = tl.where((keys[None, :] <= position[:, None]) & there[None, :], scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        weights, shrink = tl.exp2(scores - new_max[:, None]), tl.exp2(row_max - new_max)
        row_sum = row_sum * shrink + tl.sum(weights, 1)
        acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
        row_max = new_max
    out = (acc / tl.where(row_sum > 0.0, row_sum, 1.0)[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + place * stride_out + head[:, None] * D + dims[None, :], out, mask=inside)


def prefill(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_tables: torch.Tensor,
    max_query_len: int,
    scale: float,
    out: torch.Tensor,
    first_seq: int = 0,
) -> torch.Tensor:
    """Causal attention over paged K/V, one program for all heads of a group."""
    (_, _, block_size, num_kv_heads, head_dim), group = kv_cache.shape, query.shape[1] // kv_cache.shape[3]
    num_seqs = len(seq_lens) - first_seq
    if num_seqs <= 0 or max_query_len <= 0:
        return out
    stride_v, stride_block, stride_token, stride_head, _ = kv_cache.stride()
    prefill_kernel[(num_kv_heads, triton.cdiv(max_query_len * group, ROWS), num_seqs)](
        query, kv_cache, out, query_start_loc, seq_lens, block_tables, query.stride(0), out.stride(0), stride_v,
        stride_block, stride_token, stride_head, block_tables.stride(0), first_seq, scale * LOG2_E,
        B=block_size, G=group, D=head_dim, ROWS=ROWS, KEYS=KEYS,
    )  # fmt: skip
    return out
