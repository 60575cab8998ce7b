"""Every attention backend on the same blocks, a decode against the card's own copy bandwidth.

    python tools/bench_attention.py     # on a machine with a CUDA GPU

A decode moves each cached key and value through the chip once and does next to nothing with it, so its bound is the
memory: TB/s, and the share of what a plain copy reaches in the same run. A prefill's bound is arithmetic: TFLOP/s.
Medians over captured graphs where a backend can be captured; planning is included, as one plan per 28 layers.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
import triton

from folovllm.attention.backends.abstract import AttentionBackend, AttentionConfig, BackendUnavailable
from folovllm.attention.backends.registry import get_backend
from folovllm.forward_batch import ForwardBatch

LAYERS = 28
CONTEXTS = ("300-1500", "4096", "32768")
MAX_PREFILL_TOKENS = 1 << 16
LARGER_THAN_L2 = 256 << 20  # bytes of K/V to rotate through, so that no layer finds its own in the L2 cache


@dataclass(slots=True, frozen=True)
class Row:
    """One measurement. `cold_us` rotates caches as the layers of a model do; `us` reads the same one each time."""

    backend: str
    phase: str  # "prefill" | "decode"
    batch: int
    context: str
    block_size: int
    us: float  # a layer
    cold_us: float
    rate: float  # decode: TB/s; prefill: TFLOP/s
    share: float  # decode: of the copy bandwidth, 0 to 1; prefill: 0


def sequence_lengths(batch: int, context: str, seed: int = 1) -> list[int]:
    """`batch` lengths of "4096" or drawn evenly from "300-1500"."""
    low, _, high = context.partition("-")
    generator = random.Random(seed)
    return [generator.randint(int(low), int(high or low)) for _ in range(batch)]


def copy_bandwidth(device: torch.device) -> float:
    """TB/s, read plus written, of copying 2 GiB."""
    source = torch.randn(1 << 30, dtype=torch.bfloat16, device=device)
    target = torch.empty_like(source)
    milliseconds = triton.testing.do_bench(lambda: target.copy_(source), return_mode="median")
    return float(2 * source.nbytes / milliseconds / 1e9)


def make_batch(lens: list[int], block_size: int, decode: bool, device: torch.device) -> ForwardBatch:
    """A step over sequences of these lengths in shuffled blocks: one new token each, or all of them new."""
    blocks = [-(-n // block_size) for n in lens]
    ids = iter(torch.randperm(sum(blocks)).tolist())
    tables = torch.zeros(len(lens), max(blocks), dtype=torch.int32)
    for i, count in enumerate(blocks):
        tables[i, :count] = torch.tensor([next(ids) for _ in range(count)])
    new = [1] * len(lens) if decode else lens
    starts = torch.tensor([0, *new]).cumsum(0).to(torch.int32)
    nothing = torch.empty(0, dtype=torch.int64, device=device)
    return ForwardBatch(
        input_ids=nothing, positions=nothing, slot_mapping=nothing, query_start_loc=starts.to(device),
        seq_lens=torch.tensor(lens, dtype=torch.int32, device=device), block_tables=tables.to(device),
        logits_indices=nothing, num_seqs=len(lens), num_decodes=len(lens) if decode else 0, max_query_len=max(new),
        max_seq_len=max(lens), query_lens_host=new, seq_lens_host=lens,
    )  # fmt: skip


def measure(backend: AttentionBackend, query: torch.Tensor, caches: list[torch.Tensor], batch: ForwardBatch) -> float:
    """Median microseconds a layer: plan, then `LAYERS` times attention, the caches in turn."""
    layers = LAYERS if batch.max_query_len <= 16 else 3  # a prefill is long enough

    def step() -> None:
        backend.plan(batch)
        for layer in range(layers):
            backend.forward(query, caches[layer % len(caches)], batch)

    run = _captured(step) if backend.supports_cuda_graph else step
    return float(triton.testing.do_bench(run, warmup=5, rep=40, return_mode="median")) / layers * 1e3


def _captured(step: Callable[[], None]) -> Callable[[], None]:
    step()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def bench_attention(
    backends: Iterable[str] = ("torch_paged", "flash_attn", "triton"),
    batches: Iterable[int] = (1, 16, 64, 256),
    contexts: Iterable[str] = CONTEXTS,
    phases: Iterable[str] = ("decode", "prefill"),
    heads: tuple[int, int] = (16, 8),
    head_dim: int = 128,
    dtype: torch.dtype = torch.bfloat16,
    block_size: int = 256,
    report: Callable[[str], None] = print,
) -> Iterator[Row]:
    """Measure each combination on the current CUDA device, reporting as it goes; Qwen3-0.6B's shape unless told.

    A backend that cannot run is named with the reason and left out, as is a prefill of more than 65,536 tokens.

    Raises:
        BackendUnavailable: there is no CUDA GPU.
    """
    if not torch.cuda.is_available():
        raise BackendUnavailable("the attention benchmark needs a CUDA GPU")
    device, names, batches, contexts = torch.device("cuda"), list(backends), list(batches), list(contexts)
    bandwidth = copy_bandwidth(device)
    report(f"copy {bandwidth:.2f} TB/s")
    for phase in phases:
        for context in contexts:
            for size in batches:
                lens = sequence_lengths(size, context)
                if phase == "prefill" and sum(lens) > MAX_PREFILL_TOKENS:
                    continue
                config = AttentionConfig(*heads, head_dim, dtype, device, block_size, size)
                for row in _rows(names, config, phase, context, lens, bandwidth, report):
                    unit = f"TB/s {row.share:5.0%} of copy" if phase == "decode" else "TFLOP/s"
                    report(
                        f"{phase:8}{row.batch:4} x {context:9}{row.backend:12} B={block_size:<4}{row.us:10.1f} us"
                        f"  (other caches between: {row.cold_us:10.1f}){row.rate:8.2f} {unit}"
                    )
                    yield row


def _rows(
    names: list[str], config: AttentionConfig, phase: str, context: str, lens: list[int], bandwidth: float,
    report: Callable[[str], None],
) -> Iterator[Row]:  # fmt: skip
    assert config.block_size is not None
    batch = make_batch(lens, config.block_size, phase == "decode", config.device)
    shape = (2, sum(-(-n // config.block_size) for n in lens), config.num_kv_heads, config.block_size, config.head_dim)
    one = torch.Size(shape).numel() * config.dtype.itemsize
    copies = min(LAYERS, -(-LARGER_THAN_L2 // one)) if phase == "decode" else 1
    caches = [
        torch.randn(shape, dtype=config.dtype, device=config.device).permute(0, 1, 3, 2, 4) for _ in range(copies)
    ]
    tokens = len(lens) if phase == "decode" else sum(lens)
    query = torch.randn(tokens, config.num_heads, config.head_dim, dtype=config.dtype, device=config.device)
    for name in names:
        try:
            backend_class = get_backend(name)
            backend_class.check_available(config)
        except BackendUnavailable as error:
            report(f"{name} left out: {error}")
            continue
        backend = backend_class(config)
        us = measure(backend, query, caches[:1], batch)
        cold_us = measure(backend, query, caches, batch) if copies > 1 else us
        if phase == "decode":
            rate = sum(lens) * config.num_kv_heads * config.head_dim * 2 * config.dtype.itemsize / us / 1e6
            share = rate / bandwidth
        else:  # two products of n^2 / 2 scores each
            rate, share = sum(2.0 * n * n for n in lens) * config.num_heads * config.head_dim / us / 1e6, 0.0
        yield Row(name, phase, len(lens), context, config.block_size, us, cold_us, rate, share)


if __name__ == "__main__":
    try:
        list(bench_attention())
    except BackendUnavailable as error:
        sys.exit(f"{error}")
