"""What only a GPU shows: bf16, captured graphs, races, and the rival."""

import pytest
import torch

from folovllm.kernels.decode import DecodeConfig, SplitKVDecode
from folovllm.kernels.prefill import prefill
from tests.m4.cases import DEVICE, Paged, assert_close, starts
from tools.bench_attention import sequence_lengths

pytestmark = pytest.mark.gpu
LENS = [1, 16, 17, 63, 64, 65, 255, 256, 257, 0, 512, 513, 1000, 2047, 4095]
NEW = [1, 9, 17, 40, 1, 64, 100, 256, 129, 0, 300, 513, 1, 2047, 70]
SHAPES = [(16, 16, 8, 128), (256, 16, 8, 128), (256, 9, 3, 64), (48, 4, 4, 32), (16, 8, 1, 256)]  # B, Hq, Hkv, D
HALF = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("num_programs", [None, 132, 7])
def test_decode(shape, dtype, num_programs):
    """Poisoned blocks, every boundary; with few programs each takes many items from the queue."""
    block_size, heads, kv_heads, dim = shape
    paged = Paged.make(LENS, block_size, kv_heads, dim, dtype)
    query = torch.randn(len(LENS), heads, dim, device=DEVICE, dtype=dtype)
    kernel = SplitKVDecode(16, heads, kv_heads, dim, block_size, DEVICE, num_programs=num_programs)
    out = torch.full_like(query, float("nan"))
    for _ in range(3):
        kernel.plan(paged.seq_lens, len(LENS))
        kernel(query, paged.kv_cache, paged.block_tables, len(LENS), dim**-0.5, out)
        assert not kernel.queue.any() and not kernel.done.any()
    assert_close(out, paged.attention(query, [1] * len(LENS)))
    assert not out[LENS.index(0)].any()


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_prefill(shape, dtype):
    """Whole prompts, chunks, single tokens and an empty row in one ragged batch."""
    block_size, heads, kv_heads, dim = shape
    paged = Paged.make(LENS, block_size, kv_heads, dim, dtype)
    query = torch.randn(sum(NEW), heads, dim, device=DEVICE, dtype=dtype)
    out = torch.full_like(query, float("nan"))
    prefill(query, paged.kv_cache, starts(NEW), paged.seq_lens, paged.block_tables, max(NEW), dim**-0.5, out)
    assert_close(out, paged.attention(query, NEW))


@pytest.mark.parametrize(("num_seqs", "num_programs"), [(15, None), (15, 132), (64, None), (256, None)])
def test_merge_has_no_race(num_seqs, num_programs):
    """Thousands of replays of one graph, the output poisoned before each: every bit the same. Chunks are short."""
    lens = LENS if num_seqs == 15 else sequence_lengths(num_seqs, "0-1500")
    paged = Paged.make(lens, 16, 8, 128, torch.bfloat16)
    query = torch.randn(num_seqs, 16, 128, device=DEVICE, dtype=torch.bfloat16)
    config = DecodeConfig(min_chunk=64, max_chunk=64, queue_chunk=64)
    kernel = SplitKVDecode(num_seqs, 16, 8, 128, 16, DEVICE, config, num_programs)
    out, differing = torch.empty_like(query), torch.zeros((), dtype=torch.int64, device=DEVICE)

    def step(expected):
        out.fill_(float("nan"))
        kernel.plan(paged.seq_lens, num_seqs)
        kernel(query, paged.kv_cache, paged.block_tables, num_seqs, 128**-0.5, out)
        differing.add_((out.view(torch.int16) != expected.view(torch.int16)).sum())

    step(out)
    expected = out.clone()
    assert_close(expected, paged.attention(query, [1] * num_seqs))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(expected)
    differing.zero_()
    for _ in range(4000):
        graph.replay()
    assert differing.item() == 0 and not kernel.queue.any() and not kernel.done.any()


def test_one_graph_serves_all_lengths():
    """Captured with short sequences, replayed with padding, short, long and very uneven ones."""
    longest = [4096] * 8
    paged = Paged.make(longest, 16, 8, 128, torch.bfloat16)
    query = torch.randn(8, 16, 128, device=DEVICE, dtype=torch.bfloat16)
    kernel, out = SplitKVDecode(8, 16, 8, 128, 16, DEVICE), torch.empty_like(query)

    def step():
        kernel.plan(paged.seq_lens, 8)
        kernel(query, paged.kv_cache, paged.block_tables, 8, 128**-0.5, out)

    paged.seq_lens.fill_(1)
    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    few, uneven = [1, 2, 3, 0, 0, 0, 0, 0], [[4096, 1, 1, 1, 1, 1, 1, 1], [700, 1500, 33, 0, 64, 65, 1, 4000]]
    for lens in ([0] * 8, few, longest, *uneven):
        paged.seq_lens.copy_(torch.tensor(lens))
        out.fill_(float("nan"))
        graph.replay()
        assert_close(out, paged.attention(query, [1] * 8))
