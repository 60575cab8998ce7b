"""What checking guesses costs in attention and in products, by tokens of a sequence, batch and context.

    python -m tools.bench_checks     # on a machine with a CUDA GPU

Attention of captured steps: by the prefill kernel, by the kernel for checked rows, and for comparison the decode of one token
a sequence, which reads the same K/V. Products of Qwen3-0.6B's and 4B's layers: by the library, and where it serves by
`skinny_linear`. Medians over captured graphs, in microseconds a layer, with the share of the card's own copy bandwidth.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import replace

import torch
import triton

from folovllm.attention.backends.abstract import AttentionConfig
from folovllm.attention.backends.triton import TritonBackend
from folovllm.forward_batch import ForwardBatch
from folovllm.kernels.skinny_linear import serves, skinny_linear
from folovllm.spec_decode.attention import TritonVerifyBackend
from tools.bench_attention import LARGER_THAN_L2, LAYERS, copy_bandwidth, make_batch, measure

WIDTHS = (2, 4, 8, 16)  # tokens of a sequence
GEOMETRIES = {"0.6B": (1024, 4096, 2048, 3072), "4B": (2560, 6144, 4096, 9728)}  # hidden, qkv, heads, MLP


def checks_of(decodes: ForwardBatch, width: int) -> ForwardBatch:
    """The same sequences, the last `width` tokens of each new, as a captured step with guesses that has no padding."""
    device, n = decodes.seq_lens.device, decodes.num_seqs
    return replace(
        decodes, input_ids=torch.zeros(n * width, dtype=torch.int64, device=device), num_decodes=0, max_query_len=width,
        query_start_loc=torch.arange(0, n * width + 1, width, dtype=torch.int32, device=device),
        query_lens_host=[width] * n, is_padded=True, has_drafts=True,
    )  # fmt: skip


def bench_attention_of_checks(
    bandwidth: float,
    widths: Iterable[int] = WIDTHS,
    batches: Iterable[int] = (1, 8, 64),
    contexts: Iterable[int] = (512, 4096, 32768),
    heads: tuple[int, int] = (16, 8),
    head_dim: int = 128,
    block_size: int = 16,
) -> None:
    """Print a line for each; Qwen3-0.6B's shape unless told. `bandwidth` in TB/s."""
    device, dtype = torch.device("cuda"), torch.bfloat16
    for context in contexts:
        for batch in batches:
            config = AttentionConfig(*heads, head_dim, dtype, device, block_size, batch)
            decodes = make_batch([context] * batch, block_size, True, device)
            shape = (2, decodes.block_tables.numel(), heads[1], block_size, head_dim)
            one = torch.Size(shape).numel() * dtype.itemsize
            caches = [
                torch.randn(shape, dtype=dtype, device=device).permute(0, 1, 3, 2, 4)
                for _ in range(min(LAYERS, -(-LARGER_THAN_L2 // one)))
            ]
            query = torch.randn(batch * max(widths), heads[0], head_dim, dtype=dtype, device=device)
            read = 2 * batch * context * heads[1] * head_dim * dtype.itemsize
            plain = TritonBackend(config)
            us = measure(plain, query[:batch], caches, decodes)
            print(
                f"attention {batch:3} x {context:5}: decode {us:8.1f} us {read / us / bandwidth / 1e6:4.0%}", flush=True
            )
            for width in widths:
                step, own = checks_of(decodes, width), TritonVerifyBackend(config, width, batch * width)
                took = [measure(backend, query[: batch * width], caches, step) for backend in (plain, own)]
                print(
                    f"  {width:2} tokens each: prefill kernel {took[0]:8.1f} us, own {took[1]:8.1f} us "
                    f"{read / took[1] / bandwidth / 1e6:4.0%}, {took[0] / took[1]:5.2f} x, {took[1] / us:5.2f} of a decode",
                    flush=True,
                )


def bench_products(bandwidth: float, tokens: Iterable[int] = (1, 2, 3, 4, 5, 6, 8, 12, 16, 32, 64)) -> None:
    """Print a line for each number of tokens and model: the four products of a layer. `bandwidth` in TB/s."""
    for name, (hidden, qkv, heads, mlp) in GEOMETRIES.items():
        shapes = (qkv, hidden), (hidden, heads), (2 * mlp, hidden), (hidden, mlp)
        # More than the L2 cache holds.
        layers = [[torch.randn(shape, dtype=torch.bfloat16, device="cuda") for shape in shapes] for _ in range(8)]
        for count in tokens:
            xs = {n: torch.randn(count, n, dtype=torch.bfloat16, device="cuda") for _, n in shapes}
            found = []
            for multiply in torch.nn.functional.linear, skinny_linear:
                weights = [w for layer in layers for w in layer]
                if multiply is skinny_linear and not all(serves(count, w) for w in weights):
                    continue

                def step(multiply=multiply, weights=weights, xs=xs) -> None:  # type: ignore[no-untyped-def]
                    for weight in weights:
                        multiply(xs[weight.shape[1]], weight)

                milliseconds = triton.testing.do_bench_cudagraph(step, return_mode="median")
                us = milliseconds * 1e3 / len(layers)
                share = sum(w.nbytes for w in layers[0]) / us / bandwidth / 1e6
                found.append(f"{multiply.__name__} {us:7.1f} us {share:4.0%}")
            print(f"products {name} {count:3} tokens: {', '.join(found)}", flush=True)


if __name__ == "__main__":
    if not torch.cuda.is_available():
        sys.exit("this benchmark needs a CUDA GPU")
    copied = copy_bandwidth(torch.device("cuda"))
    print(f"copy {copied:.2f} TB/s")
    bench_products(copied)
    bench_attention_of_checks(copied)
