"""`SplitKVVerify`: attention of a few new tokens a sequence, the newest one and the draft behind it, over paged K/V.

As in a decode, reading K/V takes the time. The prefill kernel reads it once for each query head, and no two programs share a
sequence's keys. That suits a prompt, but five tokens behind a long context leave most of a card idle. So this is the decode
kernel with more rows in its matrix products: `G` heads of each of a tile's tokens. Only the last few keys are not seen by all rows.

`list_verify_tiles_kernel` cuts the new tokens of all sequences into tiles. The other pieces are those of the fourth milestone: `plan_kernel` lists the work, `decode_split` folds the keys that all rows see,
`prefill_loop` those that not all do, `merge_partials` merges, in a kernel of its own.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from folovllm.kernels.decode import MAX_PARTS, DecodeConfig, decode_split, merge_partials
from folovllm.kernels.decode_plan import ITEM, leave, plan_kernel, take_next
from folovllm.kernels.fp8_cache import decode_split_fp8, prefill_loop_fp8
from folovllm.kernels.online_softmax import LOG2_E, normalize
from folovllm.kernels.pdl import launch_options, let_next_start, wait_for_inputs
from folovllm.kernels.prefill import prefill_loop
from folovllm.kernels.variants import num_sms
from folovllm.step.kv_format import UNSCALED, KVScales

MOST_TOKENS = 16  # new tokens of a sequence: with more, it is a prompt
PLACE = tl.constexpr(3)  # int32s that say where a tile is: its sequence, its first token in the batch, how many tokens


@triton.jit(do_not_specialize_on_alignment=["start_ptr", "len_ptr"])
def list_verify_tiles_kernel(
    start_ptr, len_ptr, place_ptr, end_ptr, count_ptr, TILE_TOKENS: tl.constexpr, WIDTH: tl.constexpr
):
    """Program (sequence): its tiles of up to TILE_TOKENS new tokens, in order, behind those of the sequences before it.

    `start_ptr` [S+1] says where the new tokens of each sequence start, `len_ptr` [S] how many tokens it has; those of a
    sequence of length 0 are padding and get no tile. Of each tile: its place, and in `end_ptr` how many keys its last token
    sees. The last program writes how many tiles there are.
    """
    seq, i = tl.program_id(0), tl.arange(0, WIDTH)
    before = 0
    for first in range(0, seq, WIDTH):
        s = first + i
        new = tl.load(start_ptr + s + 1, mask=s < seq, other=0) - tl.load(start_ptr + s, mask=s < seq, other=0)
        real = tl.minimum(new, tl.load(len_ptr + s, mask=s < seq, other=0))
        before += tl.sum(tl.cdiv(real, TILE_TOKENS))
    start, length = tl.load(start_ptr + seq), tl.load(len_ptr + seq)
    new = tl.load(start_ptr + seq + 1) - start
    mine = tl.cdiv(tl.minimum(new, length), TILE_TOKENS)
    for first in range(0, mine, WIDTH):
        t = first + i
        inside, done = t < mine, t * TILE_TOKENS
        count = tl.minimum(TILE_TOKENS, new - done)
        place = place_ptr + (before + t) * PLACE
        tl.store(place, seq, mask=inside)
        tl.store(place + 1, start + done, mask=inside)
        tl.store(place + 2, count, mask=inside)
        tl.store(end_ptr + before + t, length - new + done + count, mask=inside)
    if seq == tl.num_programs(0) - 1:
        tl.store(count_ptr, before + mine)
        if before + mine == 0:
            tl.store(end_ptr, 0)  # which the plan of nothing looks at


@triton.jit(do_not_specialize=["num_programs", "max_chunks"])
def plan_verify_kernel(
    count_ptr, end_ptr, item_ptr, header_ptr, num_programs, max_chunks,
    HKV: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr,
    MIN_CHUNK: tl.constexpr, MAX_CHUNK: tl.constexpr, QUEUE_CHUNK: tl.constexpr, MAX_PARTS: tl.constexpr,
):  # fmt: skip
    """`plan_kernel` of the listed tiles, as if each were a sequence. There may be fewer than programs."""
    count = tl.load(count_ptr)
    if tl.program_id(0) < tl.maximum(count, 1):
        plan_kernel(
            end_ptr, item_ptr, header_ptr, count, num_programs, max_chunks, HKV=HKV, TILE=TILE, SEQS=TILES,
            MIN_CHUNK=MIN_CHUNK, MAX_CHUNK=MAX_CHUNK, QUEUE_CHUNK=QUEUE_CHUNK, MAX_PARTS=MAX_PARTS, WINDOW=0,
        )  # fmt: skip


@triton.jit
def fold_chunk(
    q, k_ptr, v_ptr, table_ptr, first, last, end, count, scale, STRIDE_BLOCK: tl.constexpr, STRIDE_TOKEN: tl.constexpr,
    B: tl.constexpr, G: tl.constexpr, TILE: tl.constexpr, M: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Attention of `q` [M, D] over the keys `first` to `last` of one KV head: G rows for each of `count` tokens.

    The last of these tokens sees `end` keys, the one before it one less. `first` is a multiple of TILE, and so is `last`
    unless it is `end`; pointers are as in `decode_split`. Returns the state of the online softmax.
    """
    split: tl.constexpr = decode_split_fp8 if k_ptr.dtype.element_ty == tl.float8e4nv else decode_split
    loop: tl.constexpr = prefill_loop_fp8 if k_ptr.dtype.element_ty == tl.float8e4nv else prefill_loop
    by_all = tl.minimum(tl.maximum((end - count + 1) // TILE * TILE, first), last)  # whole tiles that all tokens see
    row_max, row_sum, acc = split(
        q, k_ptr, v_ptr, table_ptr, first, by_all, scale, STRIDE_BLOCK, STRIDE_TOKEN, B, TILE, M, D)  # fmt: skip
    positions = end - count + tl.arange(0, M) // G
    return loop(q, row_max, row_sum, acc, k_ptr, v_ptr, table_ptr, positions, by_all, last, scale,
                True, STRIDE_BLOCK, STRIDE_TOKEN, B, TILE, D)  # fmt: skip


@triton.jit
def store_rows(
    out_ptr, first_row, num_rows, row_sum, acc, v_scale, G: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr
):
    """Write the rows from `first_row` on of a tile's output, those below `num_rows`; `out_ptr` is at its first token's first row."""
    r, dims = first_row + tl.arange(0, acc.shape[0]), tl.arange(0, D)
    row_ptr = out_ptr + (r // G * (HKV * G) + r % G)[:, None] * D
    out = (normalize(row_sum, acc) * v_scale).to(out_ptr.dtype.element_ty)
    tl.store(row_ptr + dims[None, :], out, mask=(r < num_rows)[:, None])


@triton.jit(do_not_specialize=["stride_table"], do_not_specialize_on_alignment=["table_ptr"])
def verify_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, table_ptr, place_ptr, item_ptr, header_ptr, queue_ptr, max_ptr, sum_ptr, acc_ptr,
    stride_q, stride_table, scale, v_scale,
    STRIDE_BLOCK: tl.constexpr, STRIDE_TOKEN: tl.constexpr, STRIDE_HEAD: tl.constexpr,
    B: tl.constexpr, HKV: tl.constexpr, G: tl.constexpr, D: tl.constexpr,
    TILE: tl.constexpr, M: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Work through the plan's items, KV head by KV head, as `decode_kernel` does. M rows hold a tile's tokens times G.

    Where a tile has several chunks, each leaves its state for `merge_verify_kernel`.
    """
    let_next_start(PDL)
    wait_for_inputs(PDL)
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    num_items, chunk = tl.load(header_ptr), tl.load(header_ptr + 1)
    r, dims = tl.arange(0, M), tl.arange(0, D)
    work = program
    while work < num_items:
        following = take_next(queue_ptr, num_items, num_programs)
        item, head = item_ptr + work // HKV * ITEM, work % HKV
        tile, c, end, first_partial = tl.load(item), tl.load(item + 1), tl.load(item + 2), tl.load(item + 3)
        place = place_ptr + tile * PLACE
        seq, token, count = tl.load(place), tl.load(place + 1), tl.load(place + 2)
        num_chunks, num_rows = tl.cdiv(end, chunk), count * G
        row_ptr = q_ptr + (token + r // G)[:, None].to(tl.int64) * stride_q + (head * G + r % G)[:, None] * D
        q = tl.load(row_ptr + dims[None, :], mask=(r < num_rows)[:, None], other=0.0)  # [M, D]
        row_max, row_sum, acc = fold_chunk(
            q, k_ptr + head * STRIDE_HEAD, v_ptr + head * STRIDE_HEAD, table_ptr + seq.to(tl.int64) * stride_table, c * chunk,
            tl.minimum(end, (c + 1) * chunk), end, count, scale, STRIDE_BLOCK, STRIDE_TOKEN, B, G, TILE, M, D)  # fmt: skip
        if num_chunks == 1:
            out_tile_ptr = out_ptr + (token.to(tl.int64) * HKV + head) * (G * D)
            store_rows(out_tile_ptr, 0, num_rows, row_sum, acc, v_scale, G, HKV, D)
        else:
            part = ((first_partial + c) * HKV + head) * M + r  # the merge looks at real rows alone
            tl.store(max_ptr + part, row_max)
            tl.store(sum_ptr + part, row_sum)
            tl.store(acc_ptr + part[:, None].to(tl.int64) * D + dims[None, :], acc)
        work = following
    leave(queue_ptr, tl.load(header_ptr), num_programs)


@triton.jit
def merge_verify_kernel(
    out_ptr, place_ptr, end_ptr, count_ptr, header_ptr, max_ptr, sum_ptr, acc_ptr, v_scale,
    G: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, M: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr,
    TILES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (group of ROWS rows, KV head, tile): merge what the tile's chunks have left, if it has several; then the next
    rows for which there is no program.

    A decode leaves that to the program that comes last. Here there are up to 128 rows to merge: in one program, one after
    the other, that took longer than all else.
    """
    let_next_start(PDL)
    wait_for_inputs(PDL)
    head, tile, i = tl.program_id(1), tl.program_id(2), tl.arange(0, TILES)
    chunk, place = tl.load(header_ptr + 1), place_ptr + tile * PLACE
    num_chunks, num_rows = tl.cdiv(tl.load(end_ptr + tile), chunk), tl.load(place + 2) * G
    if (tile < tl.load(count_ptr)) & (num_chunks > 1):
        before = tl.sum(tl.cdiv(tl.load(end_ptr + i, mask=i < tile, other=0), chunk))  # partial results of other tiles
        out_ptr += (tl.load(place + 1).to(tl.int64) * HKV + head) * (G * D)
        for first in range(tl.program_id(0) * ROWS, num_rows, tl.num_programs(0) * ROWS):
            total, merged = merge_partials(
                max_ptr, sum_ptr, acc_ptr, (before * HKV + head) * M + first, num_chunks, HKV * M, ROWS, D, STEP
            )
            store_rows(out_ptr, first, num_rows, total, merged, v_scale, G, HKV, D)


MOST_BYTES = 1 << 15  # of a tile's queries
MERGED = 2, 2  # rows that a program of the merge has, and its warps


def tile_shape(most_tokens: int, group: int, row_bytes: int) -> tuple[int, int]:
    """Return how many tokens share a tile, a power of two, and the rows that it then has.

    A tile has room for all new tokens of a sequence, as far as their queries of `group` heads fit into registers.
    """
    tokens = min(MOST_TOKENS, triton.next_power_of_2(most_tokens))
    while tokens > 1 and triton.next_power_of_2(tokens * group) * max(row_bytes, 256) > MOST_BYTES:
        tokens //= 2
    return tokens, max(16, triton.next_power_of_2(tokens * group))


def verify_config(rows: int, head_dim: int, itemsize: int, is_fp8: bool) -> DecodeConfig:
    """Return the configuration of a decode, with less in flight where rows take the registers."""
    return DecodeConfig(
        tile=64 if is_fp8 and rows < 64 else 32,
        num_stages=2 if head_dim * itemsize > 256 else 3,
        merge_step=max(1, 2048 // head_dim),
    )


def num_warps_of(rows: int, row_bytes: int) -> int:
    """Return the warps of a program."""
    return 8 if rows * row_bytes >= MOST_BYTES else 4


class SplitKVVerify:
    """Buffers and launches, as of `SplitKVDecode`, for up to `max_tiles` tiles. A `PrefillKernel` once it has a plan.

    `most_tokens` is how many new tokens a sequence with a draft has at most. One with more is cut into tiles,
    which all read its K/V.
    """

    def __init__(
        self, max_tiles: int, most_tokens: int, num_heads: int, num_kv_heads: int, head_dim: int, block_size: int,
        device: torch.device, itemsize: int = 2, is_fp8: bool = False, config: DecodeConfig | None = None,
        num_programs: int | None = None,
    ) -> None:  # fmt: skip
        """`itemsize`: bytes of a number in `query`; `is_fp8`: whether the cache has numbers of 8 bits."""
        self.num_kv_heads, self.head_dim, self.block_size = num_kv_heads, head_dim, block_size
        self.group = num_heads // num_kv_heads
        self.tokens, self.rows = tile_shape(most_tokens, self.group, head_dim * itemsize)
        self.config = config or verify_config(self.rows, head_dim, itemsize, is_fp8)
        self.num_warps = num_warps_of(self.rows, head_dim * itemsize)
        self.max_tiles = max_tiles
        self.num_programs = num_programs
        self.num_sms = num_sms(device)
        self.num_tiles = 0  # that the planned step may have
        self.max_chunks = max(64, self._num_programs(max_tiles) // num_kv_heads)
        items = self.max_chunks + max_tiles
        rows = items * num_kv_heads * self.rows
        self.places = torch.zeros(max_tiles, PLACE.value, dtype=torch.int32, device=device)
        self.ends, self.items = (
            torch.zeros(n, dtype=torch.int32, device=device) for n in (max_tiles, items * ITEM.value)
        )
        self.count, self.header, self.queue = torch.zeros(3, 2, dtype=torch.int32, device=device)
        self.part_max, self.part_sum = torch.zeros(2, rows, dtype=torch.float32, device=device)
        self.part_acc = torch.zeros(rows, head_dim, dtype=torch.float32, device=device)

    def _num_programs(self, num_tiles: int) -> int:
        """Return the programs of a launch, as for a decode (`launch_shape`), by measurement (`docs/performance_log.md`)."""
        work = num_tiles * self.num_kv_heads
        return self.num_programs or self.num_sms * (2 if work <= self.num_sms else 4 if work <= 4 * self.num_sms else 8)

    def tiles_of(self, num_seqs: int, num_tokens: int) -> int:
        """Return the most tiles that so many sequences with so many new tokens can have."""
        return min(num_tokens, num_seqs + num_tokens // self.tokens)

    def plan(self, query_start_loc: torch.Tensor, seq_lens: torch.Tensor, num_tokens: int) -> None:
        """List the work of the sequences of `seq_lens` [S], whose new tokens, at most `num_tokens`, start at `query_start_loc` [S+1].

        Both are int32 and contiguous; the new tokens of a sequence of length 0 are padding. `tiles_of` must allow it.
        """
        num_seqs, c = len(seq_lens), self.config
        self.num_tiles = self.tiles_of(num_seqs, num_tokens)
        list_verify_tiles_kernel[(num_seqs,)](
            query_start_loc,
            seq_lens,
            self.places,
            self.ends,
            self.count,
            TILE_TOKENS=self.tokens,
            WIDTH=128,
            num_warps=1,
        )
        plan_verify_kernel[(self.num_tiles,)](
            self.count, self.ends, self.items, self.header, self._num_programs(self.num_tiles), self.max_chunks,
            HKV=self.num_kv_heads, TILE=c.tile, TILES=triton.next_power_of_2(self.max_tiles),
            MIN_CHUNK=c.min_chunk, MAX_CHUNK=c.max_chunk, QUEUE_CHUNK=c.queue_chunk, MAX_PARTS=MAX_PARTS,
        )  # fmt: skip

    def __call__(
        self, query: torch.Tensor, kv_cache: torch.Tensor, query_start_loc: torch.Tensor, seq_lens: torch.Tensor,
        block_tables: torch.Tensor, max_query_len: int, scale: float, out: torch.Tensor, first_seq: int = 0,
        scales: KVScales = UNSCALED,
    ) -> torch.Tensor:  # fmt: skip
        """Write the attention of the planned sequences to `out`, which is contiguous. Rows of padding stay as they are."""
        k_cache, v_cache = kv_cache.unbind(0)
        stride_block, stride_token, stride_head, _ = k_cache.stride()
        tables = block_tables[first_seq:]
        verify_kernel[(self._num_programs(self.num_tiles),)](
            query, k_cache, v_cache, out, tables, self.places, self.items, self.header, self.queue,
            self.part_max, self.part_sum, self.part_acc, query.stride(0), tables.stride(0), scale * scales.key * LOG2_E,
            scales.value, STRIDE_BLOCK=stride_block, STRIDE_TOKEN=stride_token, STRIDE_HEAD=stride_head, B=self.block_size,
            HKV=self.num_kv_heads, G=self.group, D=self.head_dim, TILE=self.config.tile, M=self.rows,
            num_warps=self.num_warps, num_stages=self.config.num_stages, **launch_options(query.device, len(query)),
        )  # fmt: skip
        rows, num_warps = MERGED
        work = self.num_tiles * self.num_kv_heads
        # With many tiles a program goes on to the next.
        groups = max(1, min(self.rows // rows, 4 * self.num_sms // work))
        merge_verify_kernel[(groups, self.num_kv_heads, self.num_tiles)](
            out, self.places, self.ends, self.count, self.header, self.part_max, self.part_sum, self.part_acc, scales.value,
            G=self.group, HKV=self.num_kv_heads, D=self.head_dim, M=self.rows, ROWS=rows, STEP=self.config.merge_step,
            TILES=triton.next_power_of_2(self.max_tiles), num_warps=num_warps, **launch_options(query.device, len(query)),
        )  # fmt: skip
        return out
