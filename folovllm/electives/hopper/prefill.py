"""`prefill_hopper`: what `prefill` computes, for Hopper's copy engine (TMA) and its asynchronous matrix units (wgmma).

FlashAttention-3 (Shah et al., 2024, sections 3.1 and 3.2). Two groups of four warps compute, 64 queries each, and two
more warps do nothing but fetch K and V. A group starts the scores of a tile together with the sum of the values of the tile
before it, and waits for each alone; while it works out its softmax, the matrix units have the other group's products.

A block of the cache is a box of the copy engine. So this serves whole prompts, chunks and the rest after a cached prefix
alike, from the cache alone. It is in Gluon, the dialect of Triton in which a kernel says itself where its data lies and who
waits for whom. `prefill` reaches 420 TFLOP/s on an H200, this 560 to 620, and then the card is out of power: who takes turns
with whom, and in which order, changes nothing more (`docs/performance_log.md`).
"""

from __future__ import annotations

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from folovllm.attention.backends.abstract import AttentionConfig
from folovllm.kernels.online_softmax import LOG2_E, LOWEST
from folovllm.kernels.variants import KernelVariant

GROUP_M = gl.constexpr(64)  # queries of one group of warps: the height of a matrix instruction
TILE_M = gl.constexpr(128)  # of a program: two groups
TILE_N = gl.constexpr(128)  # keys of a tile
WIDE = gl.constexpr(64)  # columns of a box: 128 bytes, the width in which the matrix units read shared memory
LONG_STEP = 4096  # tokens of a step from which on the host is ahead of the device
NUM_STAGES = 3  # tiles of K, and of V, in shared memory
REGISTERS = gl.constexpr((232, 40))  # of a thread that computes, and of one that fetches

BOX = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))


@gluon.jit
def fetch_tiles(desc, smem, full, empty, table_ptr, kv_head, num_tiles, seq_len, HKV: gl.constexpr, B: gl.constexpr):
    """Fetch all tiles of K, or of V, the last one first, each as soon as both groups are done with what lay in its place.

    `smem` is [stages * boxes of a tile, rows of a box, 64]. A box is a block of the cache, or as much of one as a tile
    holds, and 64 of its columns. What lies past the end of the sequence is looked up past the end of the cache: zeros.
    """
    STAGES: gl.constexpr = full.shape[0]
    BOXES: gl.constexpr = smem.shape[0] // STAGES
    ROWS: gl.constexpr = smem.shape[1]
    PIECES: gl.constexpr = TILE_N // ROWS
    for i in range(num_tiles):
        rows = ()
        for piece in gl.static_range(PIECES):
            token = (num_tiles - 1 - i) * TILE_N + piece * ROWS
            block = gl.load(table_ptr + token // B, mask=token < seq_len, other=0)
            row = (block * HKV + kv_head) * B + token % B
            row = gl.where(token < seq_len, row, desc.shape[0])
            rows = rows + (row,)  # type: ignore[assignment]  # noqa: RUF005 -- Gluon knows no (*rows, row)
        stage, phase = i % STAGES, (i // STAGES) & 1
        mbarrier.wait(empty.index(stage), phase ^ 1)
        mbarrier.expect(full.index(stage), BOXES * desc.block_type.nbytes)
        for box in gl.static_range(BOXES):
            corner = [rows[box % PIECES], box // PIECES * WIDE]
            tma.async_copy_global_to_shared(desc, corner, full.index(stage), smem.index(stage * BOXES + box))


@gluon.jit
def softmax_tile(scores, row_max, row_sum, positions, tile, scale, MASKED: gl.constexpr):
    """As `online_softmax_tile` between its products: (weights [M, N], what shrinks the sums before, row_max, row_sum)."""
    if MASKED:
        keys = tile * TILE_N + gl.arange(0, TILE_N, gl.SliceLayout(0, SCORES))
        scores = gl.where(keys[None, :] <= positions[:, None], scores, float("-inf"))
    new_max = gl.maximum(row_max, gl.max(scores, 1) * scale)
    weights = gl.exp2(scores * scale - new_max[:, None])
    shrink = gl.exp2(row_max - new_max)
    return weights, shrink, new_max, row_sum * shrink + gl.sum(weights, 1)


@gluon.jit
def fold_tile(i, group, q, buffers, weights, row_max, row_sum, acc, positions, num_tiles, scale, MASKED: gl.constexpr):
    """Fold the i-th tile into the state of a group, whose `weights` [M, N] of the tile before are not yet in `acc`."""
    k_tiles, v_tiles, k_full, v_full, k_empty, v_empty = buffers
    STAGES: gl.constexpr = k_full.shape[0]
    stage, before = i % STAGES, (i - 1) % STAGES
    mbarrier.wait(k_full.index(stage), (i // STAGES) & 1)
    zeros = gl.zeros([GROUP_M, TILE_N], gl.float32, SCORES)
    scores = warpgroup_mma(q, k_tiles.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
    mbarrier.wait(v_full.index(before), ((i - 1) // STAGES) & 1)
    acc = warpgroup_mma(weights, v_tiles.index(before), acc, is_async=True)
    scores = warpgroup_mma_wait(1, deps=[scores])
    mbarrier.arrive(k_empty.index(stage))
    new_weights, shrink, row_max, row_sum = softmax_tile(
        scores, row_max, row_sum, positions, num_tiles - 1 - i, scale, MASKED)  # fmt: skip
    new_weights = gl.convert_layout(new_weights.to(weights.dtype), weights.type.layout)
    acc, new_weights = warpgroup_mma_wait(0, deps=[acc, new_weights])
    mbarrier.arrive(v_empty.index(before))
    acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, acc.type.layout))[:, None]
    return new_weights, row_max, row_sum, acc


@gluon.jit
def clear_after(v_boxes, known, D: gl.constexpr):
    """Set the values past the first `known` tokens of the first tile to 0: their weights are 0, but they may be NaN."""
    ROWS: gl.constexpr = v_boxes.shape[1]
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    exists = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT)) < known % ROWS
    for half in gl.static_range(D // WIDE):
        box = v_boxes.index(half * (TILE_N // ROWS) + known // ROWS)
        values = box.load(LAYOUT)
        box.store(gl.where(exists[:, None], values, gl.zeros_like(values)))
    fence_async_shared()


@gluon.jit
def attend(group: gl.constexpr, queries, buffers):
    """Attention of the group's 64 queries, from the last keys that they see to the first."""
    q_ptr, out_ptr, q_smem, query_len, seq_len, row0, stride_q, stride_out, num_tiles, scale = queries
    k_boxes, v_boxes, k_full, v_full, k_empty, v_empty = buffers
    DTYPE: gl.constexpr = q_smem.dtype
    D: gl.constexpr = q_smem.shape[2]
    STAGES: gl.constexpr = k_full.shape[0]
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    ROWS_OF_HEADS: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    k_tiles = k_boxes._reinterpret(DTYPE, [STAGES, TILE_N, D], BOX)
    v_tiles = v_boxes._reinterpret(DTYPE, [STAGES, TILE_N, D], BOX)
    tiles = (k_tiles, v_tiles, k_full, v_full, k_empty, v_empty)
    seen_by_all = (seq_len - query_len + row0 + 1) // TILE_N  # tiles without a mask
    row0 += group * GROUP_M

    rows = row0 + gl.arange(0, GROUP_M, gl.SliceLayout(1, ROWS_OF_HEADS))
    dims = gl.arange(0, D, gl.SliceLayout(0, ROWS_OF_HEADS))[None, :]
    inside = (rows < query_len)[:, None]
    token = rows.to(gl.int64)[:, None]
    q = q_smem.index(group)
    q.store(gl.load(q_ptr + token * stride_q + dims, mask=inside, other=0.0))
    fence_async_shared()

    # The first tile: nothing before it waits to be added up.
    positions = seq_len - query_len + row0 + gl.arange(0, GROUP_M, gl.SliceLayout(1, SCORES))
    row_max = gl.full([GROUP_M], LOWEST, gl.float32, gl.SliceLayout(1, SCORES))
    row_sum = gl.zeros([GROUP_M], gl.float32, gl.SliceLayout(1, SCORES))
    acc = gl.zeros([GROUP_M, D], gl.float32, OUT)
    zeros = gl.zeros([GROUP_M, TILE_N], gl.float32, SCORES)
    mbarrier.wait(k_full.index(0), 0)
    scores = warpgroup_mma(q, k_tiles.index(0).permute((1, 0)), zeros, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(0, deps=[scores])
    mbarrier.arrive(k_empty.index(0))
    weights, _, row_max, row_sum = softmax_tile(scores, row_max, row_sum, positions, num_tiles - 1, scale, True)
    weights = gl.convert_layout(weights.to(DTYPE), gl.DotOperandLayout(0, OUT, 2))
    known = seq_len - (num_tiles - 1) * TILE_N
    if known < TILE_N and known % k_boxes.shape[1] != 0:
        mbarrier.wait(v_full.index(0), 0)
        clear_after(v_boxes, known, D)

    masked = gl.maximum(num_tiles - seen_by_all, 1)
    for i in range(1, masked):
        weights, row_max, row_sum, acc = fold_tile(
            i, group, q, tiles, weights, row_max, row_sum, acc, positions, num_tiles, scale, True)  # fmt: skip
    for i in range(masked, num_tiles):
        weights, row_max, row_sum, acc = fold_tile(
            i, group, q, tiles, weights, row_max, row_sum, acc, positions, num_tiles, scale, False)  # fmt: skip
    last = num_tiles - 1
    mbarrier.wait(v_full.index(last % STAGES), (last // STAGES) & 1)
    acc = warpgroup_mma(weights, v_tiles.index(last % STAGES), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[acc])

    acc = acc / gl.convert_layout(row_sum, gl.SliceLayout(1, OUT))[:, None]
    q.store(acc.to(DTYPE))  # through shared memory, so that whole lines are written
    gl.store(out_ptr + token * stride_out + dims, q.load(ROWS_OF_HEADS), mask=inside)


@gluon.jit(
    do_not_specialize=["stride_table", "first_seq"],
    do_not_specialize_on_alignment=["table_ptr", "start_ptr", "len_ptr"],
)
def prefill_hopper_kernel(
    q_ptr, k_desc, v_desc, out_ptr, table_ptr, start_ptr, len_ptr, stride_q, stride_out, stride_table, first_seq, scale,
    HKV: gl.constexpr, B: gl.constexpr, G: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """128 queries of one head of one sequence; grid (Hq, tiles of the longest query, sequences), the longest work first."""
    head, seq = gl.program_id(0), first_seq + gl.program_id(2)
    start = gl.load(start_ptr + seq)
    query_len = gl.load(start_ptr + seq + 1) - start
    seq_len = gl.load(len_ptr + seq)
    row0 = (gl.num_programs(1) - 1 - gl.program_id(1)) * TILE_M
    if row0 >= query_len:
        return
    q_ptr += start.to(gl.int64) * stride_q + head * D
    out_ptr += start.to(gl.int64) * stride_out + head * D
    table_ptr += seq.to(gl.int64) * stride_table
    num_tiles = gl.cdiv(gl.minimum(seq_len, seq_len - query_len + row0 + TILE_M), TILE_N)

    DTYPE: gl.constexpr = k_desc.dtype
    ROWS: gl.constexpr = k_desc.block_shape[0]
    BOXES: gl.constexpr = STAGES * (D // WIDE) * (TILE_N // ROWS)
    q_smem = gl.allocate_shared_memory(DTYPE, [2, GROUP_M, D], BOX)
    k_boxes = gl.allocate_shared_memory(DTYPE, [BOXES, ROWS, WIDE], BOX)
    v_boxes = gl.allocate_shared_memory(DTYPE, [BOXES, ROWS, WIDE], BOX)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(k_empty.index(stage), count=2)  # both groups
        mbarrier.init(v_empty.index(stage), count=2)
    fence_async_shared()

    queries = (q_ptr, out_ptr, q_smem, query_len, seq_len, row0, stride_q, stride_out, num_tiles, scale)
    buffers = (k_boxes, v_boxes, k_full, v_full, k_empty, v_empty)
    gl.warp_specialize([
        (attend, (0, queries, buffers)),
        (attend, (1, queries, buffers)),
        (fetch_tiles, (k_desc, k_boxes, k_full, k_empty, table_ptr, head // G, num_tiles, seq_len, HKV, B)),
        (fetch_tiles, (v_desc, v_boxes, v_full, v_empty, table_ptr, head // G, num_tiles, seq_len, HKV, B)),
    ], [4, 1, 1], [REGISTERS[0], REGISTERS[1], REGISTERS[1]])  # fmt: skip


def prefill_hopper(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_tables: torch.Tensor,
    max_query_len: int,
    scale: float,
    out: torch.Tensor | None = None,
    first_seq: int = 0,
) -> torch.Tensor:
    """Return the attention of `prefill`, where `is_supported` says so.

    Args:
        kv_cache: [2, N, B, Hkv, D], a view of [2, N, Hkv, B, D], whose two halves are contiguous.
    """
    out = torch.empty_like(query, memory_format=torch.contiguous_format) if out is None else out
    num_seqs = seq_lens.shape[0] - first_seq
    if num_seqs <= 0 or max_query_len <= 0:
        return out
    (_, _, block_size, num_kv_heads, head_dim), num_heads = kv_cache.shape, query.shape[1]
    box = [min(block_size, TILE_N.value), WIDE.value]
    k_desc, v_desc = (
        TensorDescriptor.from_tensor(half.transpose(1, 2).view(-1, head_dim), box, BOX.value)
        for half in kv_cache.unbind(0)
    )
    prefill_hopper_kernel[(num_heads, triton.cdiv(max_query_len, TILE_M.value), num_seqs)](
        query, k_desc, v_desc, out, block_tables, query_start_loc, seq_lens,
        query.stride(0), out.stride(0), block_tables.stride(0), first_seq, scale * LOG2_E,
        HKV=num_kv_heads, B=block_size, G=num_heads // num_kv_heads, D=head_dim, STAGES=NUM_STAGES, num_warps=4,
    )  # fmt: skip
    return out


def is_supported(config: AttentionConfig, num_tokens: int, max_query_len: int) -> bool:
    """Whether it computes a step of so many new tokens, the longest share of which is given, faster than `prefill`.

    In half precision, for tiles that its registers hold, in whole boxes.
    """
    dim, size = config.head_dim, config.block_size
    possible = config.dtype in (torch.bfloat16, torch.float16) and dim in (64, 128) and not config.is_fp8
    boxes = size in (16, 32, 64) or (size is not None and size % TILE_N.value == 0)
    return possible and boxes and is_ahead(dim, num_tokens, max_query_len)


def is_ahead(head_dim: int, num_tokens: int, max_query_len: int) -> bool:
    """Whether it is faster than `prefill` in a step of so many new tokens, the longest share of which is given.

    A launch costs the host 46 us more, for the boxes are described anew each time: only where the device is far behind is
    that free. And its programs begin and end slowly, which short heads make up for later.
    """
    return num_tokens >= LONG_STEP and max_query_len >= (256 if head_dim == 128 else 2048)


VARIANT = KernelVariant(is_supported, prefill_hopper)
