"""A layer of experts by itself: `python tools/bench_experts.py` on a machine with a CUDA GPU.

Qwen3-30B-A3B's geometry (128 experts of 768, of which a token asks 8, hidden size 2,048) unless told otherwise. For each number
of tokens the microseconds of each kernel in a captured graph, several layers in turn so that no weight is found in the L2
cache. Two bounds beside them: few tokens can be no faster than the bytes of the experts that are asked, at the rate of a plain
copy in the same run; many no faster than one dense product of the same size, which the library computes.
`--tiles` tries other tiles and prints the best.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from itertools import product

import torch
import torch.nn.functional as F
import triton

from folovllm.kernels import grouped_linear as kernels
from folovllm.kernels.grouped_linear import grouped_linear
from folovllm.kernels.route import choose, combine
from folovllm.layers.moe import sort_by_expert

TOKENS = (1, 2, 4, 16, 64, 256, 1024, 4096)
LAYERS = 6
CANDIDATES = [
    (m, n, k, warps, stages)
    for m, (n, k), warps, stages in product(
        (16, 32, 64, 128), ((16, 128), (32, 128), (32, 256), (64, 64), (64, 128), (128, 64)), (4, 8), (2, 3, 4, 5)
    )
]


def microseconds(work: Callable[[int], object]) -> float:
    """Median time of `work(layer)`, of all layers in one graph."""
    for layer in range(LAYERS):
        work(layer)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in range(LAYERS):
            work(layer)
    return float(triton.testing.do_bench(graph.replay, return_mode="median")) * 1e3 / LAYERS


def copy_rate() -> float:
    """Bytes a microsecond, read plus written."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / (triton.testing.do_bench(lambda: target.copy_(source), return_mode="median") * 1e3)


def best_tiles(run: Callable[[int], object], few: bool) -> tuple[float, tuple[int, ...]]:
    """The fastest of `CANDIDATES`; what a card cannot hold is left out."""
    found, ours = [], kernels.tiles_for
    for tiles in CANDIDATES:
        if few != (tiles[0] == 16):
            continue
        kernels.tiles_for = lambda *_, tiles=tiles: tiles
        try:
            found.append((microseconds(run), tiles))
        except triton.runtime.errors.OutOfResources:
            continue
    kernels.tiles_for = ours
    return min(found)


def main() -> None:
    """A row for each number of tokens."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--inner", type=int, default=768)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--asked", type=int, default=8)
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--tiles", action="store_true", help="search for better tiles")
    args = parser.parse_args()
    dtype, rate = torch.bfloat16, copy_rate()
    gate_up = torch.randn(LAYERS, args.experts, 2 * args.inner, args.hidden, dtype=dtype, device="cuda") / 50
    down = torch.randn(LAYERS, args.experts, args.hidden, args.inner, dtype=dtype, device="cuda") / 50
    print(f"copy {rate / 1e6:.2f} TB/s")
    print("tokens  choose  gate_up    down  combine     sum   floor (experts read)   dense  share")
    for tokens in args.tokens:
        x = torch.randn(tokens, args.hidden, dtype=dtype, device="cuda")
        logits = torch.randn(tokens, args.experts, dtype=dtype, device="cuda")
        held = range(args.experts)
        weights, experts, placed = choose(logits, args.asked, True, held)
        order, starts = placed or sort_by_expert(experts, args.experts)
        hidden = grouped_linear(x, gate_up[0], order, starts, gated=True)
        answers = grouped_linear(hidden, down[0], order, starts).view(tokens, args.asked, args.hidden)

        def chosen(_: int, logits: torch.Tensor = logits) -> None:
            _, experts, placed = choose(logits, args.asked, True, held)
            if placed is None:
                sort_by_expert(experts, args.experts)

        def up(i: int, x: torch.Tensor = x, order: torch.Tensor = order, starts: torch.Tensor = starts) -> object:
            return grouped_linear(x, gate_up[i], order, starts, gated=True)

        def back(
            i: int, h: torch.Tensor = hidden, order: torch.Tensor = order, starts: torch.Tensor = starts
        ) -> object:
            return grouped_linear(h, down[i], order, starts)

        def added(_: int, answers: torch.Tensor = answers, weights: torch.Tensor = weights) -> object:
            return combine(answers, weights)

        times = [microseconds(work) for work in (chosen, up, back, added)]
        asked = int((starts.diff() > 0).sum())
        floor = asked * 3 * args.hidden * args.inner * 2 / rate
        rows = torch.randn(tokens * args.asked, args.hidden, dtype=dtype, device="cuda")
        narrow = torch.randn(tokens * args.asked, args.inner, dtype=dtype, device="cuda")
        dense = microseconds(lambda i: (F.linear(rows, gate_up[i, 0]), F.linear(narrow, down[i, 0])))  # noqa: B023
        products = times[1] + times[2]
        bound = max(floor, dense)
        print(
            f"{tokens:6d} {times[0]:7.1f} {times[1]:8.1f} {times[2]:7.1f} {times[3]:8.1f} {sum(times):7.1f} {floor:7.1f} ({asked:3d})"
            f"{dense:18.1f} {bound / products:6.0%}", flush=True,
        )  # fmt: skip
        if args.tiles:
            for name, work in (("gate_up", up), ("down", back)):
                best, tiles = best_tiles(work, tokens * args.asked // args.experts <= 16)
                print(f"       {name}: {best:.1f} us with tiles {tiles}", flush=True)


if __name__ == "__main__":
    main()
