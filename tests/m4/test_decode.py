"""Split-KV decode: the plan, one chunk, the merge, and all of it."""

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from triton._C.libtriton import ir

from folovllm.kernels.decode import DecodeConfig, SplitKVDecode, decode_split, merge_partials
from folovllm.kernels.online_softmax import LOG2_E
from folovllm.kernels.online_softmax import LOWEST as LOWEST_IN_KERNELS
from tests.m4.cases import DEVICE, Paged, assert_close
from tests.tiny import worked_case

LOWEST = LOWEST_IN_KERNELS.value
LENS = [1, 15, 16, 17, 0, 32, 33, 64, 65, 130]
SMALL = DecodeConfig(tile=16, min_chunk=32, max_chunk=32, queue_chunk=32, merge_step=2)


@given(st.lists(st.integers(0, 700), min_size=1, max_size=6), st.sampled_from([1, 4, 16]), st.integers(1, 40))
@settings(max_examples=15)
def test_plan_covers_every_token_once(lens, heads, num_programs):
    """Items are (sequence, chunk, length, first partial); each sequence's chunks are complete, partials never overlap."""
    kernel = SplitKVDecode(
        6, heads, heads, 16, 16, DEVICE, DecodeConfig(16, min_chunk=32, max_chunk=256, queue_chunk=128), num_programs
    )
    kernel.plan(torch.tensor(lens, dtype=torch.int32, device=DEVICE), len(lens))
    total, chunk = kernel.header.tolist()
    items = kernel.items[: total // heads].tolist()
    expected = [(s, c) for s, n in enumerate(lens) for c in range(max(1, -(-n // chunk)))]
    assert total == heads * len(expected) and sorted((s, c) for s, c, _, _ in items) == expected
    assert all(n == lens[s] for s, _, n, _ in items)
    assert len({first + c for _, c, _, first in items}) == len(items) <= kernel.items.shape[0]
    sizes = [min(chunk, n - c * chunk) for _, c, n, _ in items]
    assert sizes == sorted(sizes, reverse=True), "long items first"
    assert chunk == 128 or total <= num_programs, "items wait only where no chunk gives each its program"


@triton.jit
def split_kernel(
    q_ptr, k_ptr, v_ptr, table_ptr, max_ptr, sum_ptr, acc_ptr, first, last, scale,
    STRIDE_BLOCK: tl.constexpr, STRIDE_TOKEN: tl.constexpr, B: tl.constexpr, M: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """One chunk of one KV head."""
    m, d = tl.arange(0, M), tl.arange(0, D)
    q = tl.load(q_ptr + m[:, None] * D + d[None, :])
    row_max, row_sum, acc = decode_split(
        q, k_ptr, v_ptr, table_ptr, first, last, scale, STRIDE_BLOCK, STRIDE_TOKEN, B, 16, M, D
    )
    tl.store(max_ptr + m, row_max)
    tl.store(sum_ptr + m, row_sum)
    tl.store(acc_ptr + m[:, None] * D + d[None, :], acc)


def state_of_chunk(paged, q, first, last, scale):
    """What the loop over the keys `first` to `last` of the only sequence leaves: maxima, sums [16], and weighted values [16, 16]."""
    state = torch.empty(16, device=DEVICE), torch.empty(16, device=DEVICE), torch.empty(16, 16, device=DEVICE)
    k, v = paged.kv_cache
    split_kernel[(1,)](q, k, v, paged.block_tables, *state, first, last, scale,
                       STRIDE_BLOCK=k.stride(0), STRIDE_TOKEN=k.stride(1), B=k.shape[1], M=16, D=16)  # fmt: skip
    return state


def test_a_worked_case_of_a_chunk():
    """Keys 16 to 33 of a sequence of 34, in blocks of 8 and tiles of 16. All scores are -2, the value of token i is i."""
    paged, position = Paged.make([34], 8, 1, 16), torch.arange(34, device=DEVICE)
    k, v = paged.kv_cache
    where = paged.block_tables[0, position // 8], position % 8, torch.zeros_like(position)
    k[where], v[where] = -2.0, position[:, None].float()
    q = torch.zeros(16, 16, device=DEVICE)
    q[:, 0] = 1
    row_max, row_sum, acc = state_of_chunk(paged, q, 16, 34, 1.0)
    got = {"row_max": row_max[0], "row_sum": row_sum[0], "acc": acc[0, 0]}
    says = "18 keys whose scores are all the largest, so their weights are 1; and 16 + 17 + ... + 33 = 441"
    worked_case("m4.4", got, {"row_max": -2.0, "row_sum": 18.0, "acc": 441.0}, says)


@pytest.mark.parametrize("block_size", [8, 16, 32])
@pytest.mark.parametrize(("first", "last"), [(0, 1), (0, 40), (16, 33), (32, 48), (48, 48)])
def test_one_chunk(block_size, first, last):
    """Keys `first` to `last` and no others; the blocks hold NaN from token 48 on."""
    paged = Paged.make([48], block_size, 1, 16)
    q = torch.randn(16, 16, device=DEVICE)
    row_max, row_sum, acc = state_of_chunk(paged, q, first, last, 0.25 * LOG2_E)
    position = torch.arange(first, last, device=DEVICE)
    key, value = paged.kv_cache[:, paged.block_tables[0, position // block_size], position % block_size, 0].double()
    if first == last:
        assert not row_sum.any() and not acc.any(), "an empty chunk leaves the state as it starts"
        return
    scores = q.double() @ key.T * 0.25
    says = f"keys {first} to {last}, blocks of {block_size}"
    assert_close(row_max / LOG2_E, scores.amax(-1), says=f"row_max of {says}")
    assert_close(row_sum, (scores - scores.amax(-1, keepdim=True)).exp().sum(-1), says=f"row_sum of {says}")
    assert_close(acc / row_sum[:, None], scores.softmax(-1) @ value, says=f"acc / row_sum of {says}")


@triton.jit
def state_kernel(q_ptr, table_ptr, max_ptr, M: tl.constexpr, D: tl.constexpr):
    """The state of an empty chunk: what the loop begins with."""
    q = tl.load(q_ptr + tl.arange(0, M)[:, None] * D + tl.arange(0, D)[None, :])
    row_max, row_sum, acc = decode_split(q, q_ptr, q_ptr, table_ptr, 0, 0, 1.0, D, D, 16, 16, M, D)
    tl.static_assert(row_max.dtype == tl.float32, "row_max begins in float32, or no GPU compiles the loop")
    tl.static_assert(row_sum.dtype == tl.float32, "row_sum begins in float32, or no GPU compiles the loop")
    tl.static_assert(acc.dtype == tl.float32, "acc begins in float32: with another type no GPU compiles the loop")
    tl.store(max_ptr + tl.arange(0, M), row_max)


def test_the_state_is_float32_whatever_the_queries_are():
    """float16 here. The interpreter goes on with a wider type by itself, so only an empty chunk shows it."""
    row_max = torch.zeros(16, device=DEVICE)
    q, table = torch.zeros(16, 16, device=DEVICE, dtype=torch.float16), torch.zeros(1, device=DEVICE, dtype=torch.int32)
    state_kernel[(1,)](q, table, row_max, M=16, D=16)
    assert (row_max == LOWEST).all(), (
        f"an empty chunk leaves row_max at {LOWEST:.0e}, not at {row_max[0]:.0e}: of -inf the merge makes inf - inf"
    )


@pytest.mark.parametrize("block_size", [8, 16, 32])
@pytest.mark.parametrize(("first", "last"), [(0, 1), (0, 40), (16, 33), (32, 47)])
def test_no_key_outside_the_chunk_is_read(block_size, first, last, like_a_gpu):
    """All others are NaN, and so is what a mask left out: weight 0 would not save the sum from either."""
    paged = Paged.make([48], block_size, 1, 16)
    position = torch.arange(48, device=DEVICE)
    blocks, within = paged.block_tables[0, position // block_size], position % block_size
    outside = (position < first) | (position >= last)
    key, value = paged.kv_cache[:, blocks[~outside], within[~outside], 0].double()
    paged.kv_cache[:, blocks[outside], within[outside]] = float("nan")
    q = torch.randn(16, 16, device=DEVICE)
    _, row_sum, acc = state_of_chunk(paged, q, first, last, 0.25 * LOG2_E)
    assert_close(acc / row_sum[:, None], (q.double() @ key.T * 0.25).softmax(-1) @ value)


@triton.jit
def merge_kernel(
    max_ptr, sum_ptr, acc_ptr, sum_out, acc_out, first_row, chunks, stride, G: tl.constexpr, D: tl.constexpr
):
    """The merge alone."""
    g, d = tl.arange(0, G), tl.arange(0, D)
    row_sum, acc = merge_partials(max_ptr, sum_ptr, acc_ptr, first_row, chunks, stride, G, D, 4)
    tl.store(sum_out + g, row_sum)
    tl.store(acc_out + g[:, None] * D + d[None, :], acc)


def test_a_worked_case_of_the_merge():
    """Five chunks, four a turn, of two heads: maxima -4, -3, -3, -3, -2 less 500 (the first head) or 300 (the second)."""
    maxima, sums, accs = torch.zeros(16, device=DEVICE), torch.ones(16, device=DEVICE), torch.full((16, 16), 99.0)
    accs = accs.to(DEVICE)
    parts = zip([-4.0, -3.0, -3.0, -3.0, -2.0], [2.0, 1.0, 1.0, 1.0, 1.0], [4.0, 2.0, 2.0, 2.0, 8.0], strict=True)
    for chunk, (largest, total, value) in enumerate(parts):
        row = 1 + 3 * chunk  # the first row is 1, and rows of others lie in between
        maxima[row : row + 2] = largest - torch.tensor([500.0, 300.0], device=DEVICE)
        sums[row : row + 2], accs[row], accs[row + 1] = total, value, 2 * value
    row_sum, acc = torch.empty(2, device=DEVICE), torch.empty(2, 16, device=DEVICE)
    merge_kernel[(1,)](maxima, sums, accs, row_sum, acc, 1, 5, 3, 2, 16)
    got = {"first head": acc[0, 0] / row_sum[0], "second head": acc[1, 0] / row_sum[1]}
    says = "weights 1/4, 1/2, 1/2, 1/2, 1; sums 2/4 + 3/2 + 1 = 3; acc 4/4 + 6/2 + 8 = 12, the second head's twice that"
    worked_case("m4.5", got, {"first head": 4.0, "second head": 8.0}, says)


@pytest.mark.parametrize("chunks", [1, 3, 4, 9])
@pytest.mark.parametrize("rising", [False, True])
def test_merge_is_log_sum_exp(chunks, rising):
    """Maxima 100 apart, the largest first or last, and one chunk that saw nothing; rows of others lie in between."""
    group, dim, stride, first = 2, 16, 6, 3
    rows = first + chunks * stride
    maxima = torch.randn(rows, device=DEVICE) + 100.0 * torch.arange(rows, device=DEVICE) / rows * (1 if rising else -1)
    sums, accs = torch.rand(rows, device=DEVICE) + 0.5, torch.randn(rows, dim, device=DEVICE)
    own = first + torch.arange(chunks, device=DEVICE)[:, None] * stride + torch.arange(group, device=DEVICE)
    if chunks > 3:
        maxima[own[1]], sums[own[1]], accs[own[1]] = -1e30, 0.0, 0.0
    others = torch.ones(rows, dtype=torch.bool, device=DEVICE)
    others[own.flatten()] = False
    accs[others] = float("nan")
    row_sum, acc = torch.empty(group, device=DEVICE), torch.empty(group, dim, device=DEVICE)
    merge_kernel[(1,)](maxima, sums, accs, row_sum, acc, first, chunks, stride, group, dim)
    weight = (maxima[own] - maxima[own].amax(0)).double().exp2()  # [chunks, G]
    expected = (weight[..., None] * accs[own].double()).sum(0) / (weight * sums[own]).sum(0)[:, None]
    assert_close(acc / row_sum[:, None], expected)


@pytest.mark.parametrize("chunks", [3, 5])
def test_merge_of_heads_far_from_zero_and_from_each_other(chunks, like_a_gpu):
    """Scores near -500 for one head, 500 for the other: a chunk that is not there, or the other head, must not count."""
    maxima = torch.randn(chunks * 2, device=DEVICE) + torch.tensor([-500.0, 500.0], device=DEVICE).repeat(chunks)
    sums, accs = torch.rand(chunks * 2, device=DEVICE) + 0.5, torch.randn(chunks * 2, 16, device=DEVICE)
    row_sum, acc = torch.empty(2, device=DEVICE), torch.empty(2, 16, device=DEVICE)
    merge_kernel[(1,)](maxima, sums, accs, row_sum, acc, 0, chunks, 2, 2, 16)
    m, total, states = maxima.view(-1, 2).double(), sums.view(-1, 2).double(), accs.view(-1, 2, 16).double()
    weight = (m - m.amax(0)).exp2()  # [chunks, 2]
    assert_close(acc / row_sum[:, None], (weight[..., None] * states).sum(0) / (weight * total).sum(0)[:, None])


def test_merge_beyond_int32(like_a_gpu):
    """Two rows of a buffer of 2 ** 31 numbers, of which nearly none is touched: times D a row's number is too much for int32."""
    first, dim = 2**27 - 1, 16
    maxima, sums = (torch.empty(first + 2, device=DEVICE) for _ in range(2))
    accs = torch.empty((first + 2) * dim, dtype=torch.int8, device=DEVICE)
    maxima[first:], sums[first:], accs[first * dim :] = 0.0, 1.0, 6
    row_sum, acc = torch.empty(1, device=DEVICE), torch.empty(1, dim, device=DEVICE)
    merge_kernel[(1,)](maxima, sums, accs, row_sum, acc, first, 2, 1, 1, dim)
    assert (row_sum.item(), acc.tolist()) == (2.0, [[12.0] * dim]), "the second row's place in acc overflowed int32"


def test_merge_reads_past_the_l1_cache(like_a_gpu):
    """What other programs wrote may be stale in there, which no run in the interpreter shows."""
    sums, accs, row_sum, acc = (torch.ones(n, device=DEVICE) for n in (3, 48, 1, 16))
    merge_kernel[(1,)](torch.zeros_like(sums), sums, accs, row_sum, acc, 0, 3, 1, 1, 16)
    assert like_a_gpu or DEVICE.type == "cuda", "what is past the last chunk must not be read: load with a mask"
    assert all(caching == ir.CACHE_MODIFIER.CG for caching in like_a_gpu), 'they are loaded with cache_modifier=".cg"'


@pytest.mark.parametrize(("lens", "options"), [
    *((LENS, {"block_size": size}) for size in (8, 16, 24, 64)),  # three programs for some 17 items of 32 tokens
    *((LENS[-4:], {"num_programs": count}) for count in (1, 2, 200)),  # one that does it all, and more than work
    *(([40, 7], {"heads": heads}) for heads in ((1, 1), (4, 2), (3, 1), (14, 2))),
    ([70, 3], {"dim": 32, "dtype": torch.float16}),
    ([0, 0, 0], {}),  # padding alone
    ([100, 5], {"config": None, "num_programs": None}),  # the table's own: the grid follows the batch's size
])  # fmt: skip
def test_the_whole_decode(lens, options):
    """Around every boundary, with heads in groups of any size; a row of length 0 gets zeros."""
    given = {"block_size": 16, "heads": (2, 1), "dim": 16, "dtype": torch.float32, "config": SMALL, "num_programs": 3}
    block_size, heads, dim, dtype, config, num_programs = (given | options).values()
    paged = Paged.make(lens, block_size, heads[1], dim, dtype)
    query = torch.randn(len(lens), heads[0], dim, device=DEVICE, dtype=dtype)
    kernel = SplitKVDecode(len(lens) + 2, *heads, dim, block_size, DEVICE, config, num_programs)
    out = torch.empty_like(query)
    for _ in range(2):  # the counters must wind back
        out.fill_(float("nan"))
        kernel.plan(paged.seq_lens, len(lens))
        kernel(query, paged.kv_cache, paged.block_tables, len(lens), dim**-0.5, out)
        assert not kernel.queue.any() and not kernel.done.any()
    assert_close(out, paged.attention(query, [1] * len(lens)), says=f"sequences of {lens} tokens")
    assert not out[paged.seq_lens == 0].any()
