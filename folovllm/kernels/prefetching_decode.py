"""Decode attention for a few sequences that prefetches cached keys and values before the QKV projection ends.

With one request there is little to read, and the attention of a layer waits for several loads in turn: the work item, the block
ids, K and V. Only the new token's query, key and value depend on the QKV projection. So a program loads all else before it waits
for the projection (`pdl`), and keeps its first TILE keys and values in registers.

The early loads are safe, because no later kernel of the step writes what they read. The plan and the block tables are complete
before the first layer, since the embedding between them is launched without `pdl`. The K/V of all other tokens are from earlier
steps.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from folovllm.kernels.decode import SplitKVDecode, store_partial
from folovllm.kernels.decode_plan import ITEM
from folovllm.kernels.online_softmax import LOG2_E, LOWEST, normalize, online_softmax_tile
from folovllm.kernels.pdl import available, launch_options, let_next_start, wait_for_inputs
from folovllm.kernels.qk_norm_rope import Preparation, norm_rope

MAX_SEQS = 4  # more were not measured
MAX_HEAD_DIM, MAX_GROUP = 128, 8  # a tile and the queries of a KV head must fit into registers
TILE, NUM_WARPS, NUM_STAGES, PROGRAMS = 64, 4, 2, 2  # PROGRAMS: on each multiprocessor


@triton.jit
def load_tile(
    k_ptr, v_ptr, table_ptr, first, last, STRIDE_BLOCK: tl.constexpr, STRIDE_TOKEN: tl.constexpr, B: tl.constexpr,
    TILE: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Return keys and values [TILE, D] of the tokens from `first` on, and a mask [TILE] of the tokens before `last`."""
    tokens = first + tl.arange(0, TILE)
    inside = tokens < last
    blocks = tl.load(table_ptr + tokens // B, mask=inside, other=0).to(tl.int64)
    offsets = (blocks * STRIDE_BLOCK + tokens % B * STRIDE_TOKEN)[:, None] + tl.arange(0, D)[None, :]
    k = tl.load(k_ptr + offsets, mask=inside[:, None], other=0.0)
    v = tl.load(v_ptr + offsets, mask=inside[:, None], other=0.0)
    return k, v, inside


@triton.jit
def begin_with(is_mine, query, key, value, scale, M: tl.constexpr, D: tl.constexpr):
    """Return the state of the online softmax after the new token alone, `key` and `value` [1, D]. Without `is_mine` it is empty."""
    score = tl.sum(query.to(tl.float32) * key.to(tl.float32), 1) * scale
    row_max = tl.where(is_mine, score, LOWEST)
    row_sum = tl.where(is_mine, 1.0, 0.0) + tl.zeros([M], tl.float32)
    acc = tl.where(is_mine, value.to(tl.float32), 0.0) + tl.zeros([M, D], tl.float32)
    return row_max, row_sum, acc


@triton.jit(do_not_specialize=["stride_table"], do_not_specialize_on_alignment=["table_ptr"])
def prefetching_decode_kernel(
    qkv_ptr, k_ptr, v_ptr, out_ptr, table_ptr, item_ptr, header_ptr, done_ptr, max_ptr, sum_ptr, acc_ptr,
    q_weight_ptr, k_weight_ptr, cos_sin_ptr, stride_q, stride_table, scale, eps,
    STRIDE_BLOCK: tl.constexpr, STRIDE_TOKEN: tl.constexpr, STRIDE_HEAD: tl.constexpr,
    B: tl.constexpr, HKV: tl.constexpr, G: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr,
    TILE: tl.constexpr, M: tl.constexpr, STEP: tl.constexpr, PDL: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Work through the plan's items like `decode_kernel` with RAW. Most programs have one item or none.

    The new token's key and value come from the projection, and are stored in the cache at the end, for later steps.
    """
    let_next_start(PDL)
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    num_items, chunk = tl.load(header_ptr), tl.load(header_ptr + 1)
    g, i = tl.arange(0, M), tl.arange(0, D)[None, :]
    real, partner = (g < G)[:, None], (i + D // 2) % D
    for work in range(tl.program_id(0), num_items, tl.num_programs(0)):
        item, head = item_ptr + work // HKV * ITEM, work % HKV
        seq, c, seq_len, first_partial = tl.load(item), tl.load(item + 1), tl.load(item + 2), tl.load(item + 3)
        num_chunks, position = tl.cdiv(seq_len, chunk), tl.maximum(seq_len - 1, 0)
        first, is_last = c * chunk, (c == num_chunks - 1) & (seq_len > 0)
        last = tl.minimum(position, first + chunk)  # end of the cached keys
        table = table_ptr + seq.to(tl.int64) * stride_table
        k_head, v_head = k_ptr + head * STRIDE_HEAD, v_ptr + head * STRIDE_HEAD
        k, v, inside = load_tile(k_head, v_head, table, first, last, STRIDE_BLOCK, STRIDE_TOKEN, B, TILE, D)
        angle_ptr = cos_sin_ptr + position.to(tl.int64) * D
        cos, sin = tl.load(angle_ptr + i % (D // 2)), tl.load(angle_ptr + D // 2 + i % (D // 2))
        slot = tl.load(table + position // B).to(tl.int64) * STRIDE_BLOCK + position % B * STRIDE_TOKEN
        q_weight, q_weight_2, k_weight, k_weight_2 = cos, cos, cos, cos
        if NORM:
            q_weight, q_weight_2 = tl.load(q_weight_ptr + i), tl.load(q_weight_ptr + partner)
            k_weight, k_weight_2 = tl.load(k_weight_ptr + i), tl.load(k_weight_ptr + partner)
        wait_for_inputs(PDL)

        token_ptr = qkv_ptr + seq.to(tl.int64) * stride_q
        query_ptr, key_ptr = token_ptr + ((head * G + g) * D)[:, None], token_ptr + (HKV * G + head) * D
        query, query_2 = (
            tl.load(query_ptr + i, mask=real, other=0.0),
            tl.load(query_ptr + partner, mask=real, other=0.0),
        )
        key, key_2, value = tl.load(key_ptr + i), tl.load(key_ptr + partner), tl.load(key_ptr + HKV * D + i)
        query = norm_rope(query, query_2, q_weight, q_weight_2, cos, sin, eps, NORM, D, DTYPE)  # [M, D]
        key = norm_rope(key, key_2, k_weight, k_weight_2, cos, sin, eps, NORM, D, DTYPE)  # [1, D]
        row_max, row_sum, acc = begin_with(is_last, query, key, value, scale, M, D)
        row_max, row_sum, acc = online_softmax_tile(query, k, v, inside[None, :], row_max, row_sum, acc, scale)
        for start in range(first + TILE, last, TILE):
            k, v, inside = load_tile(k_head, v_head, table, start, last, STRIDE_BLOCK, STRIDE_TOKEN, B, TILE, D)
            row_max, row_sum, acc = online_softmax_tile(query, k, v, inside[None, :], row_max, row_sum, acc, scale)
        out_row = (seq * HKV + head) * G
        if num_chunks <= 1:
            tl.store(out_ptr + (out_row + g)[:, None] * D + i, normalize(row_sum, acc).to(DTYPE), mask=real)
        else:
            store_partial(
                row_max, row_sum, acc, max_ptr, sum_ptr, acc_ptr, done_ptr + seq * HKV + head, out_ptr + out_row * D,
                (first_partial * HKV + head) * GROUP, c, num_chunks, HKV * GROUP, 1.0, G, GROUP, D, M, STEP)  # fmt: skip
        if is_last:
            tl.store(k_ptr + slot + head * STRIDE_HEAD + i, key)
            tl.store(v_ptr + slot + head * STRIDE_HEAD + i, value)


def is_supported(decode: SplitKVDecode, kv_cache: torch.Tensor, num_seqs: int) -> bool:
    """Return whether this kernel is faster: kernels overlap, the sequences are few, and a tile fits into registers."""
    fits = decode.head_dim <= MAX_HEAD_DIM and decode.num_heads <= MAX_GROUP * decode.num_kv_heads
    is_plain = kv_cache.dtype in (torch.bfloat16, torch.float16) and not decode.window
    return fits and is_plain and num_seqs <= MAX_SEQS and available(kv_cache.device)


def prefetching_decode(
    decode: SplitKVDecode, qkv: torch.Tensor, kv_cache: torch.Tensor, block_tables: torch.Tensor, num_seqs: int,
    scale: float, out: torch.Tensor, preparation: Preparation, num_programs: int | None = None,
) -> torch.Tensor:  # fmt: skip
    """Return what `decode` returns with a `preparation`. It uses the plan and the buffers of `decode`.

    The cache has the model's own dtype. `num_programs` overrides the size of the grid.
    """
    (k_cache, v_cache), (stride_block, stride_token, stride_head, _) = kv_cache.unbind(0), kv_cache.stride()[1:]
    q_weight, k_weight = preparation.q_weight, preparation.k_weight
    prefetching_decode_kernel[(num_programs or PROGRAMS * decode.num_sms,)](
        qkv, k_cache, v_cache, out, block_tables, decode.items, decode.header, decode.done,
        decode.part_max, decode.part_sum, decode.part_acc, qkv if q_weight is None else q_weight,
        qkv if k_weight is None else k_weight, preparation.cos_sin_cache, qkv.stride(0), block_tables.stride(0),
        scale * LOG2_E, preparation.eps,
        STRIDE_BLOCK=stride_block, STRIDE_TOKEN=stride_token, STRIDE_HEAD=stride_head,
        B=decode.block_size, HKV=decode.num_kv_heads, G=decode.num_heads // decode.num_kv_heads, GROUP=decode.group,
        D=decode.head_dim, TILE=TILE, M=max(16, decode.group), STEP=decode.config.merge_step,
        NORM=q_weight is not None, num_warps=NUM_WARPS, num_stages=NUM_STAGES, **launch_options(qkv.device, num_seqs),
    )  # fmt: skip
    return out
