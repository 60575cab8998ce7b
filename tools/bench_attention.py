"""Every attention backend on the same blocks, a decode against the card's own copy bandwidth.

    python -m tools.bench_attention             # on a machine with a CUDA GPU; Qwen3-0.6B's heads
    python -m tools.bench_attention --verify    # captured steps that verify draft tokens, beside a decode of the same K/V

A decode moves each cached key and value through the chip once and does next to nothing with it, so its bound is the
memory: TB/s, and the share of what a plain copy reaches in the same run. A prefill's bound is arithmetic: TFLOP/s.
Medians over captured graphs where a backend can be captured, in microseconds a layer; planning is included, as one plan per
28 layers. "Other caches between": caches take turns as the layers of a model do, so that none is found in the L2 cache.
"""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product

import torch

from folovllm.attention.backends.abstract import AttentionBackend, AttentionConfig, BackendUnavailable
from folovllm.attention.backends.registry import get_backend
from folovllm.attention.backends.triton import TritonBackend
from folovllm.step.forward_batch import ForwardBatch
from tools.gpu import card_rates, microseconds, parser_of, print_row

LAYERS = 28
BACKENDS = ("torch_paged", "flash_attn", "triton")
CONTEXTS = ("300-1500", "4096", "32768")
BATCHES = (1, 16, 64, 256)
MAX_PREFILL_TOKENS = 1 << 16
LARGER_THAN_L2 = 256 << 20  # bytes of K/V to rotate through
WIDTHS = (2, 4, 8, 16)  # verified tokens of a sequence


def sequence_lengths(batch: int, context: str, seed: int = 1) -> list[int]:
    """`batch` lengths of "4096" or drawn evenly from "300-1500"."""
    low, _, high = context.partition("-")
    generator = random.Random(seed)
    return [generator.randint(int(low), int(high or low)) for _ in range(batch)]


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


def verified(decodes: ForwardBatch, width: int) -> ForwardBatch:
    """The same sequences, the last `width` tokens of each new, as a captured step with draft tokens that has no padding."""
    device, n = decodes.seq_lens.device, decodes.num_seqs
    return replace(
        decodes, input_ids=torch.zeros(n * width, dtype=torch.int64, device=device), num_decodes=0, max_query_len=width,
        query_start_loc=torch.arange(0, n * width + 1, width, dtype=torch.int32, device=device),
        query_lens_host=[width] * n, is_padded=True, has_drafts=True,
    )  # fmt: skip


def measure(backend: AttentionBackend, query: torch.Tensor, caches: list[torch.Tensor], batch: ForwardBatch) -> float:
    """Median microseconds a layer: plan, then `LAYERS` times attention, the caches in turn."""
    layers = LAYERS if batch.max_query_len <= 16 else 3  # a prefill is long enough

    def step() -> None:
        backend.plan(batch)
        for layer in range(layers):
            backend.forward(query, caches[layer % len(caches)], batch)

    return microseconds(step, as_graph=backend.supports_cuda_graph) / layers


class Step:
    """Sequences of these lengths, their K/V in as many caches as take turns, and queries for them."""

    def __init__(self, lens: list[int], block_size: int, decode: bool = True, width: int = 1) -> None:
        self.config = AttentionConfig(16, 8, 128, torch.bfloat16, torch.device("cuda"), block_size, len(lens))
        self.lens, self.decode = lens, decode
        self.batch = make_batch(lens, block_size, decode, self.config.device)
        shape = (2, sum(-(-n // block_size) for n in lens), 8, block_size, 128)
        copies = min(LAYERS, -(-LARGER_THAN_L2 // (2 * torch.Size(shape).numel()))) if decode else 1
        new = {"dtype": torch.bfloat16, "device": "cuda"}
        self.caches = [torch.randn(shape, **new).permute(0, 1, 3, 2, 4) for _ in range(copies)]
        self.query = torch.randn(len(lens) * width if decode else sum(lens), 16, 128, **new)
        self.num_bytes = 2 * sum(lens) * 8 * 128 * 2  # of K/V that a decode reads

    def cells(self, name: str, bandwidth: float) -> list[object]:
        """What the backend takes, or why it is left out."""
        try:
            get_backend(name).check_available(self.config)
        except BackendUnavailable as error:
            return [f"  left out: {error}"]
        backend = get_backend(name)(self.config)
        us = measure(backend, self.query, self.caches[:1], self.batch)
        cold = measure(backend, self.query, self.caches, self.batch) if len(self.caches) > 1 else us
        if not self.decode:  # two products of n^2 / 2 scores each
            return [us, cold, f"{sum(2.0 * n * n for n in self.lens) * 16 * 128 / us / 1e6:.2f} TFLOP/s"]
        rate = 1e6 * self.num_bytes / us
        return [us, cold, f"{rate / 1e12:.2f} TB/s", f"{rate / bandwidth:.0%} of copy"]


def bench_backends(bandwidth: float) -> None:
    """Print a line for each phase, number of sequences, context and backend; no prefill of more than 65,536 tokens."""
    print_row("us a layer", "one cache", "others between")
    for phase, context, size in product(("decode", "prefill"), CONTEXTS, BATCHES):
        lens = sequence_lengths(size, context)
        if phase == "decode" or sum(lens) <= MAX_PREFILL_TOKENS:
            step = Step(lens, 256, phase == "decode")
            for name in BACKENDS:
                print_row(f"{phase} {size} x {context} {name}", *step.cells(name, bandwidth))


def bench_verification(bandwidth: float) -> None:
    """Print a decode, and verification by the prefill kernel and by the kernel of its own, for each batch and context."""
    from folovllm.electives.spec_decode.attention import TritonVerifyBackend

    print_row("us a layer", "", "of the floor", "own kernel", "of the floor", "prefill / own", "own / decode")
    for context, batch in product((512, 4096, 32768), (1, 8, 64)):
        step = Step([context] * batch, 16, width=max(WIDTHS))
        plain, floor = TritonBackend(step.config), 1e6 * step.num_bytes / bandwidth
        decode = measure(plain, step.query[:batch], step.caches, step.batch)
        print_row(f"{batch} x {context}, decode", decode, f"{floor / decode:.0%}")
        for width in WIDTHS:
            backend = TritonVerifyBackend(step.config, width, batch * width)
            work = step.query[: batch * width], step.caches, verified(step.batch, width)
            prefill, own = measure(plain, *work), measure(backend, *work)
            shares = f"{floor / prefill:.0%}", own, f"{floor / own:.0%}", prefill / own, own / decode
            print_row(f"  {width} tokens each, prefill kernel", prefill, *shares)


def main() -> None:
    """Print the card's rates and the lines of what was asked for."""
    parser = parser_of(__doc__)
    parser.add_argument("--verify", action="store_true", help="steps that verify draft tokens")
    args = parser.parse_args()
    (bench_verification if args.verify else bench_backends)(card_rates().copy)


if __name__ == "__main__":
    main()
