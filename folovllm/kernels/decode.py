"""`SplitKVDecode`: attention of one new token a sequence over paged K/V, near the memory bandwidth.

Flash-Decoding (Dao, Haziza, Massa and Sizov, 2023): different programs read the chunks of a sequence's keys, and the partial
results are merged by log-sum-exp. Here the chunks of all sequences form one work list:

1. `plan_kernel`, once a step: chooses the chunk's length and lists the (sequence, chunk) items (`decode_plan`);
2. `decode_kernel`, once a layer: a fixed number of programs work through the list. Their number does not depend on lengths, so
   one captured graph serves every step. Long and short sequences balance, because a program that is done takes the next item.
   The program that finishes a sequence's last chunk merges its partial results, so there is no second kernel.

The query heads that share a KV head are rows of one matrix product, so K/V is read once for all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from folovllm.kernels.decode_plan import ITEM, leave, plan_kernel, take_next
from folovllm.kernels.fp8_cache import decode_split_fp8
from folovllm.kernels.online_softmax import LOG2_E, LOWEST, block_ids, normalize, online_softmax_tile, tile_offsets
from folovllm.kernels.pdl import launch_options, let_next_start, wait_for_inputs
from folovllm.kernels.qk_norm_rope import Preparation, prepare_token
from folovllm.kernels.variants import num_sms
from folovllm.kernels.window import first_seen, window_loop
from folovllm.step.kv_format import UNSCALED, KVScales


@triton.jit
def decode_split(
    q, k_ptr, v_ptr, table_ptr, first, last, scale, STRIDE_BLOCK: tl.constexpr, STRIDE_TOKEN: tl.constexpr,
    B: tl.constexpr, TILE: tl.constexpr, M: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Attention of `q` [M, D] over one chunk, the keys `first` to `last` of one KV head; `first` is a multiple of TILE.

    `k_ptr` and `v_ptr` point to the KV head, `table_ptr` to the sequence's row of the block tables; dimensions are
    contiguous. K/V at and past `last` is not read, for it may be NaN. Returns the state of the online softmax: row_max
    [M], row_sum [M], acc [M, D]. An empty chunk leaves it as it starts.
    """
    row_max = tl.full([M], LOWEST, tl.float32)
    row_sum = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, D], tl.float32)
    dims = tl.arange(0, D)
    blocks = block_ids(table_ptr, first, last, B, TILE)
    for token in range(first, last, TILE):
        offsets = tile_offsets(blocks, token, B, TILE, STRIDE_BLOCK, STRIDE_TOKEN)[:, None] + dims[None, :]  # [TILE, D]
        # A tile ahead: were K/V to wait for this load, half of the pipeline's buffers would go to the ids.
        blocks = block_ids(table_ptr, token + TILE, last, B, TILE)
        inside = token + tl.arange(0, TILE) < last
        k = tl.load(k_ptr + offsets, mask=inside[:, None], other=0.0)
        v = tl.load(v_ptr + offsets, mask=inside[:, None], other=0.0)
        row_max, row_sum, acc = online_softmax_tile(q, k, v, inside[None, :], row_max, row_sum, acc, scale)
    return row_max, row_sum, acc


@triton.jit
def attend_chunk(
    q, k_ptr, v_ptr, table_ptr, seq_len, first, last, scale, STRIDE_BLOCK: tl.constexpr, STRIDE_TOKEN: tl.constexpr,
    B: tl.constexpr, TILE: tl.constexpr, M: tl.constexpr, D: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Return what `decode_split` returns for the `q` of the last of `seq_len` tokens. It also reads FP8 caches and WINDOWs (0: none)."""
    split: tl.constexpr = decode_split_fp8 if k_ptr.dtype.element_ty == tl.float8e4nv else decode_split
    if WINDOW:
        row_max, row_sum, acc = window_loop(
            q, k_ptr, v_ptr, table_ptr, tl.full([M], 0, tl.int32) + seq_len - 1, first, last, scale, WINDOW,
            STRIDE_BLOCK, STRIDE_TOKEN, B, TILE, M, D)  # fmt: skip
    else:
        row_max, row_sum, acc = split(
            q, k_ptr, v_ptr, table_ptr, first, last, scale, STRIDE_BLOCK, STRIDE_TOKEN, B, TILE, M, D)  # fmt: skip
    return row_max, row_sum, acc


@triton.jit
def merge_partials(
    max_ptr, sum_ptr, acc_ptr, first_row, num_chunks, stride, GROUP: tl.constexpr, D: tl.constexpr, STEP: tl.constexpr
):
    """Merge the partial results of `num_chunks` chunks by log-sum-exp; returns (row_sum [GROUP], acc [GROUP, D]).

    Chunk c's rows start at row `first_row + c * stride`: max and sum are [rows], acc is [rows, D], float32. Each was
    summed relative to its maximum; exp2(that - the largest, head by head) brings all to one scale. STEP chunks a turn:
    what is past the last weighs nothing. Reads go past the L1 cache (`cache_modifier=".cg"`), which may be stale.
    """
    g, dims = tl.arange(0, GROUP), tl.arange(0, D)
    row_max = tl.full([GROUP], LOWEST, tl.float32)
    row_sum = tl.zeros([GROUP], tl.float32)
    acc = tl.zeros([GROUP, D], tl.float32)
    for c0 in range(0, num_chunks, STEP):
        c = c0 + tl.arange(0, STEP)
        rows = first_row + c[:, None] * stride + g[None, :]  # [STEP, GROUP]
        real = (c < num_chunks)[:, None]
        part_max = tl.load(max_ptr + rows, mask=real, other=LOWEST, cache_modifier=".cg")
        part_sum = tl.load(sum_ptr + rows, mask=real, other=0.0, cache_modifier=".cg")
        part_acc = tl.load(acc_ptr + rows[:, :, None].to(tl.int64) * D + dims[None, None, :],
                           mask=real[:, :, None], other=0.0, cache_modifier=".cg")  # fmt: skip
        new_max = tl.maximum(row_max, tl.max(part_max, 0))
        shrink, weight = tl.exp2(row_max - new_max), tl.exp2(part_max - new_max[None, :])
        row_sum = row_sum * shrink + tl.sum(part_sum * weight, 0)
        acc = acc * shrink[:, None] + tl.sum(part_acc * weight[:, :, None], 0)
        row_max = new_max
    return row_sum, acc


@triton.jit
def store_partial(
    row_max, row_sum, acc, max_ptr, sum_ptr, acc_ptr, done_ptr, out_ptr, first_row, c, num_chunks, stride, v_scale,
    G: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, M: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Store chunk c's state as a partial result. The program of a sequence's last one merges all, and stores the output [G, D].

    `done_ptr` counts the partial results, and is zero again afterwards. Rows are those of `merge_partials`.
    """
    g, gg, dims = tl.arange(0, M), tl.arange(0, GROUP), tl.arange(0, D)
    part, kept = first_row + c * stride, g < GROUP
    tl.store(max_ptr + part + g, row_max, mask=kept)
    tl.store(sum_ptr + part + g, row_sum, mask=kept)
    tl.store(acc_ptr + (part + g)[:, None].to(tl.int64) * D + dims[None, :], acc, mask=kept[:, None])
    tl.debug_barrier()  # all threads have stored before one of them counts the result
    if tl.atomic_add(done_ptr, 1, sem="acq_rel") == num_chunks - 1:
        tl.store(done_ptr, 0)
        total, merged = merge_partials(max_ptr, sum_ptr, acc_ptr, first_row, num_chunks, stride, GROUP, D, STEP)
        merged = (normalize(total, merged) * v_scale).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + gg[:, None] * D + dims[None, :], merged, mask=(gg < G)[:, None])


@triton.jit(do_not_specialize=["stride_table"], do_not_specialize_on_alignment=["table_ptr"])
def decode_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, table_ptr, item_ptr, header_ptr, queue_ptr, done_ptr, max_ptr, sum_ptr, acc_ptr,
    q_weight_ptr, k_weight_ptr, cos_sin_ptr, stride_q, stride_table, scale, eps, v_scale,
    k_factor, v_factor, offset_ptr,
    STRIDE_BLOCK: tl.constexpr, STRIDE_TOKEN: tl.constexpr, STRIDE_HEAD: tl.constexpr,
    B: tl.constexpr, HKV: tl.constexpr, G: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr,
    TILE: tl.constexpr, M: tl.constexpr, STEP: tl.constexpr, PDL: tl.constexpr, RAW: tl.constexpr, NORM: tl.constexpr,
    WINDOW: tl.constexpr,
):  # fmt: skip
    """Work through the plan's items, KV head by KV head. G query heads share one; GROUP and M round that up.

    queue = [items taken, programs gone] and done [S * Hkv] are zero before and after every launch. RAW: `q_ptr` is the
    projection [S, (Hq + 2 Hkv) D], and new keys and values are not in the cache yet (`prepare_token`).
    WINDOW: how many keys a query sees; 0: all.
    """
    let_next_start(PDL)
    wait_for_inputs(PDL)
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    num_items, chunk = tl.load(header_ptr), tl.load(header_ptr + 1)
    g, dims = tl.arange(0, M), tl.arange(0, D)
    real = g < G
    work = program
    while work < num_items:
        following = take_next(queue_ptr, num_items, num_programs)
        item, head = item_ptr + work // HKV * ITEM, work % HKV
        seq, c, seq_len, first_partial = tl.load(item), tl.load(item + 1), tl.load(item + 2), tl.load(item + 3)
        begin = 0  # the first key that the query sees, rounded down to a tile
        if WINDOW:
            begin = first_seen(seq_len - 1, WINDOW, TILE)
        num_chunks = tl.cdiv(seq_len - begin, chunk)
        table = table_ptr + seq.to(tl.int64) * stride_table
        token_ptr = q_ptr + seq.to(tl.int64) * stride_q
        if RAW:
            q = prepare_token(
                token_ptr, q_weight_ptr, k_weight_ptr, cos_sin_ptr, k_ptr, v_ptr, table, head, tl.maximum(seq_len - 1, 0),
                c == num_chunks - 1, eps, k_factor, v_factor, offset_ptr, STRIDE_BLOCK, STRIDE_TOKEN, STRIDE_HEAD, B, HKV, G, M, D, NORM)  # fmt: skip
        else:
            rows = (head * G + g)[:, None] * D
            q = tl.load(token_ptr + rows + dims[None, :], mask=real[:, None], other=0.0)  # [M, D]
        row_max, row_sum, acc = attend_chunk(
            q, k_ptr + head * STRIDE_HEAD, v_ptr + head * STRIDE_HEAD, table, seq_len, begin + c * chunk,
            tl.minimum(seq_len, begin + (c + 1) * chunk), scale, STRIDE_BLOCK, STRIDE_TOKEN, B, TILE, M, D, WINDOW)  # fmt: skip
        out_row = (seq * HKV + head) * G
        if num_chunks <= 1:
            out = (normalize(row_sum, acc) * v_scale).to(out_ptr.dtype.element_ty)
            tl.store(out_ptr + (out_row + g)[:, None] * D + dims[None, :], out, mask=real[:, None])
        else:
            store_partial(
                row_max, row_sum, acc, max_ptr, sum_ptr, acc_ptr, done_ptr + seq * HKV + head, out_ptr + out_row * D,
                (first_partial * HKV + head) * GROUP, c, num_chunks, HKV * GROUP, v_scale, G, GROUP, D, M, STEP)  # fmt: skip
        work = following
    leave(queue_ptr, num_items, num_programs)


@dataclass(slots=True, frozen=True)
class DecodeConfig:
    """Keys a tile, pipeline stages, chunk lengths in keys (`plan_kernel`), and results that are merged at a time.

    Tiles are small and programs are many, because only the number of reads in flight matters (`docs/performance_log.md`).
    """

    tile: int = 32
    num_stages: int = 3
    min_chunk: int = 64
    max_chunk: int = 4096
    queue_chunk: int = 1024
    merge_step: int = 16


MAX_PARTS = 64  # results to merge a sequence


def launch_config(work: int, num_sms: int) -> tuple[int, int]:
    """Return the programs on each multiprocessor, and the warps of each, for `work` = sequences x KV heads.

    There is at least one program for each unit of work, and more to split it, but few if there is little to read: an idle program
    has a cost. In between all programs run in about one wave, and the longest one decides, so each has more warps. The result
    depends on the batch's size and never on lengths, so a captured graph can keep it.
    """
    if work > 8 * num_sms:
        return -(-work // num_sms), 2
    if work > 2 * num_sms:
        return 8, 4
    if work > num_sms:
        return 6, 2
    return 4 if 4 * work > num_sms else 2, 2


class SplitKVDecode:
    """Buffers and launches of the split-KV decode for up to `max_num_seqs` sequences.

    `plan` runs once a step and a call once a layer; both are device work alone and may be captured in a graph. Calls
    must follow one another on one stream, since they share the buffers. `num_programs` overrides the grid's size. With a
    `window` a token sees no more than so many, itself included, and what is before them is not read.
    """

    def __init__(
        self, max_num_seqs: int, num_heads: int, num_kv_heads: int, head_dim: int, block_size: int,
        device: torch.device, config: DecodeConfig | None = None, num_programs: int | None = None, window: int | None = None,
    ) -> None:  # fmt: skip
        self.config, self.window = config or DecodeConfig(), window or 0
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.head_dim, self.block_size = head_dim, block_size
        self.num_programs = num_programs
        self.num_sms = num_sms(device)
        self.seqs = triton.next_power_of_2(max_num_seqs)
        self.group = triton.next_power_of_2(num_heads // num_kv_heads)
        # Chunks grow with the batch's tokens, so this number of full chunks is enough for any lengths.
        self.max_chunks = max(64, 8 * self._launch_config(max_num_seqs)[0] // num_kv_heads)
        items = self.max_chunks + max_num_seqs
        rows = items * num_kv_heads * self.group
        self.items = torch.zeros(items, ITEM.value, dtype=torch.int32, device=device)
        self.header = torch.zeros(2, dtype=torch.int32, device=device)
        self.queue = torch.zeros(2, dtype=torch.int32, device=device)
        self.done = torch.zeros(max_num_seqs * num_kv_heads, dtype=torch.int32, device=device)
        self.part_max, self.part_sum = torch.empty(2, rows, dtype=torch.float32, device=device)
        self.part_acc = torch.empty(rows, head_dim, dtype=torch.float32, device=device)

    def _launch_config(self, num_seqs: int) -> tuple[int, int]:
        programs, warps = launch_config(num_seqs * self.num_kv_heads, self.num_sms)
        return self.num_programs or self.num_sms * programs, warps

    def plan(self, seq_lens: torch.Tensor, num_seqs: int) -> None:
        """List the work of the first `num_seqs` sequences of `seq_lens` [S] int32, a contiguous tensor."""
        plan_kernel[(num_seqs,)](
            seq_lens, self.items, self.header, num_seqs, self._launch_config(num_seqs)[0], self.max_chunks,
            HKV=self.num_kv_heads, TILE=self.config.tile, SEQS=self.seqs,
            MIN_CHUNK=self.config.min_chunk, MAX_CHUNK=self.config.max_chunk,
            QUEUE_CHUNK=self.config.queue_chunk, MAX_PARTS=MAX_PARTS, WINDOW=self.window,
        )  # fmt: skip

    def __call__(
        self, query: torch.Tensor, kv_cache: torch.Tensor, block_tables: torch.Tensor, num_seqs: int, scale: float,
        out: torch.Tensor, preparation: Preparation | None = None, scales: KVScales = UNSCALED,
    ) -> torch.Tensor:  # fmt: skip
        """Attention of the `num_seqs` planned sequences: the first rows of `query` [T, Hq, D] into those of `out`.

        `kv_cache` [2, N, B, Hkv, D] may be strided, D contiguous; `out` is contiguous. A row of length 0 gets zeros.
        With `preparation`, `query` is the projection [S, (Hq + 2 Hkv) D], and the new tokens are stored on the way.
        `scales` are those of K and V in the cache.
        """
        (k_cache, v_cache), (stride_block, stride_token, stride_head, _) = kv_cache.unbind(0), kv_cache.stride()[1:]
        raw = preparation or Preparation(query)  # without one the kernel reads no field of it
        num_programs, num_warps = self._launch_config(num_seqs)
        decode_kernel[(num_programs,)](
            query, k_cache, v_cache, out, block_tables, self.items, self.header, self.queue, self.done,
            self.part_max, self.part_sum, self.part_acc, query if raw.q_weight is None else raw.q_weight,
            query if raw.k_weight is None else raw.k_weight, raw.cos_sin_cache, query.stride(0), block_tables.stride(0),
            scale * scales.key * LOG2_E, raw.eps, scales.value, scales.key_factor, scales.value_factor,
            scales.offset if preparation else None,
            STRIDE_BLOCK=stride_block, STRIDE_TOKEN=stride_token, STRIDE_HEAD=stride_head,
            B=self.block_size, HKV=self.num_kv_heads, G=self.num_heads // self.num_kv_heads, GROUP=self.group,
            D=self.head_dim, TILE=self.config.tile, M=max(16, self.group), STEP=self.config.merge_step,
            RAW=preparation is not None, NORM=raw.q_weight is not None, WINDOW=self.window, num_warps=num_warps,
            num_stages=self.config.num_stages, **launch_options(query.device, num_seqs),
        )  # fmt: skip
        return out
