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
from functools import partial
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


class Work:
    """What a layer does for some tokens; each method takes the number of the layer."""

    def __init__(self, tokens: int, asked: int, gate_up: torch.Tensor, down: torch.Tensor) -> None:
        self.gate_up, self.down, self.asked = gate_up, down, asked
        _, num_experts, hidden, inner = down.shape
        draw = partial(torch.randn, dtype=down.dtype, device="cuda")
        self.x, self.logits = draw(tokens, hidden), draw(tokens, num_experts)
        self.weights, self.order, self.starts = self.choose(0)
        self.inner, self.answers = self.up(0), self.back_of(draw(tokens * asked, inner), 0).view(tokens, asked, hidden)
        self.rows = draw(tokens * asked, hidden)

    def choose(self, _: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        held = range(self.logits.shape[1])
        weights, experts, placed = choose(self.logits, self.asked, True, held)
        return weights, *(placed or sort_by_expert(experts, len(held)))

    def up(self, i: int) -> torch.Tensor:
        return grouped_linear(self.x, self.gate_up[i], self.order, self.starts, gated=True)

    def back_of(self, inner: torch.Tensor, i: int) -> torch.Tensor:
        return grouped_linear(inner, self.down[i], self.order, self.starts)

    def back(self, i: int) -> torch.Tensor:
        return self.back_of(self.inner, i)

    def add(self, _: int) -> torch.Tensor:
        return combine(self.answers, self.weights)

    def dense(self, i: int) -> object:
        """All pairs as if they asked one expert."""
        return F.linear(self.rows, self.gate_up[i, 0]), F.linear(self.inner, self.down[i, 0])


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
    rate = copy_rate()
    shape = (LAYERS, args.experts, args.hidden, args.inner)
    down = torch.randn(shape, dtype=torch.bfloat16, device="cuda") / 50
    gate_up = torch.randn(LAYERS, args.experts, 2 * args.inner, args.hidden, dtype=down.dtype, device="cuda") / 50
    print(f"copy {rate / 1e6:.2f} TB/s")
    print("tokens  choose  gate_up    down  combine     sum  experts read  floor   dense  share")
    for tokens in args.tokens:
        work = Work(tokens, args.asked, gate_up, down)
        times = [microseconds(part) for part in (work.choose, work.up, work.back, work.add)]
        read = int((work.starts.diff() > 0).sum())
        floor, dense = read * 3 * args.hidden * args.inner * 2 / rate, microseconds(work.dense)
        print(
            f"{tokens:6d} {times[0]:7.1f} {times[1]:8.1f} {times[2]:7.1f} {times[3]:8.1f} {sum(times):7.1f} {read:13d} "
            f"{floor:6.1f} {dense:7.1f} {max(floor, dense) / (times[1] + times[2]):6.0%}", flush=True,
        )  # fmt: skip
        if args.tiles:
            for name, part in (("gate_up", work.up), ("down", work.back)):
                best, tiles = best_tiles(part, tokens * args.asked // args.experts <= 16)
                print(f"       {name}: {best:.1f} us with tiles {tiles}", flush=True)


if __name__ == "__main__":
    main()
