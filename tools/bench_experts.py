"""A layer of experts by itself: `python -m tools.bench_experts` on a machine with a CUDA GPU.

Qwen3-30B-A3B's geometry: 128 experts of 768, of which a token is routed to 8, hidden size 2,048. For each number of tokens it
prints the microseconds of each kernel in a captured graph, several layers in turn so that no weight is found in the L2 cache,
and of all four one after the other. Two bounds stand beside them. Few tokens can be no faster than the bytes of the experts that
are read, at the rate of a plain copy in the same run; many can be no faster than one dense product of the same size, which the
library computes. `--tiles` gives both products other tiles than the engine's, in turn: pairs, outputs, along K, warps, stages; or
of the kernel for few tokens (bfloat16): warps, rows, elements at a time.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from statistics import median
from unittest.mock import patch

import torch
import torch.nn.functional as F

from folovllm.moe.kernels import grouped_linear, moe_gemv
from folovllm.moe.kernels.route import choose, combine
from folovllm.quantization.kernels import grouped_quant
from folovllm.quantization.weight import QuantizedWeight
from tools.bench_attention import copy_bandwidth

TOKENS = (1, 2, 4, 16, 64, 256, 1024, 4096)
LAYERS, ROUNDS = 6, 4
FORMATS = ("bf16", "fp8", "int8", "int4")
Tiles = tuple[int, ...]
NAMES = ("TILE_M", "TILE_N", "TILE_K", "num_warps", "num_stages")


def microseconds(work: Callable[[int], object], replays: int = 20) -> float:
    """Median time of `work(layer)`, of all layers in one graph, some rounds."""
    for layer in range(LAYERS):
        work(layer)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in [*range(LAYERS)] * ROUNDS:
            work(layer)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 3)]
    for event in events:
        event.record()
        graph.replay()
    torch.cuda.synchronize()
    times = [begin.elapsed_time(end) for begin, end in pairwise(events[2:])]  # the first two only warm up
    return median(times) * 1e3 / (LAYERS * ROUNDS)


@dataclass(frozen=True)
class Shape:
    """Sizes of a layer with experts, and the format of their weights."""

    format: str
    hidden: int = 2048
    inner: int = 768
    experts: int = 128
    top_k: int = 8

    def weights(self, part: str) -> torch.Tensor | QuantizedWeight:
        """Of one layer; what is in them does not matter, but for the time that random numbers take."""
        rows, k = (2 * self.inner, self.hidden) if part == "gate_up" else (self.hidden, self.inner)
        rows *= self.experts
        with torch.device("cuda"):
            if self.format == "bf16":
                return torch.randn(self.experts, rows // self.experts, k, dtype=torch.bfloat16) / 50
            if self.format == "fp8":
                codes = torch.randint(0, 120, (rows, k), dtype=torch.uint8).view(torch.float8_e4m3fn)
                return QuantizedWeight(codes, torch.rand(rows // 128, k // 128), 128, 128)
            if self.format == "int8":
                return QuantizedWeight(torch.randint(-127, 128, (rows, k), dtype=torch.int8), torch.rand(rows, 1), 1, k)
            words = torch.randint(-(2**31), 2**31, (rows, k // 8), dtype=torch.int32)
            return QuantizedWeight(words, torch.rand(rows, k // 128, dtype=torch.float16), 1, 128)

    def multiply(
        self,
        part: str,
        weights: torch.Tensor | QuantizedWeight,
        x: torch.Tensor,
        order: torch.Tensor,
        starts: torch.Tensor,
    ) -> torch.Tensor:
        """The product of all experts."""
        gated = part == "gate_up"
        if isinstance(weights, QuantizedWeight):
            return grouped_quant.grouped_quant(x, weights, self.experts, order, starts, gated)
        return grouped_linear.grouped_linear(x, weights, order, starts, gated)


def using(tiles: Tiles) -> AbstractContextManager[object]:
    """Return a context in which all products use these tiles."""
    quantized, stack = dict(zip(NAMES, tiles, strict=False)), ExitStack()
    for module, name, stand_in in (
        (grouped_quant, "tiles", lambda *_: quantized),
        (grouped_linear, "tiles_for", lambda *_: tiles),
        (grouped_linear, "kernel_variant", lambda *_: None),
        (moe_gemv, "serves", lambda *_: len(tiles) == 3),
        (moe_gemv, "tiling", lambda *_: tiles),
    ):
        stack.enter_context(patch.object(module, name, stand_in))
    return stack


class Work:
    """What a layer does for some tokens; each method takes the number of the layer."""

    def __init__(self, shape: Shape, tokens: int, layers: dict[str, list[torch.Tensor | QuantizedWeight]]) -> None:
        self.shape, self.layers = shape, layers
        draw = partial(torch.randn, dtype=torch.bfloat16, device="cuda")
        self.x, self.logits = draw(tokens, shape.hidden), draw(tokens, shape.experts)
        self.weights, self.order, self.starts = self.choose(0)
        self.inner, self.rows = (draw(tokens * shape.top_k, n) for n in (shape.inner, shape.hidden))
        self.answers = self.back(0).view(tokens, shape.top_k, shape.hidden)

    def choose(self, _: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        weights, _experts, order, starts = choose(self.logits, self.shape.top_k, True, range(self.shape.experts))
        return weights, order, starts

    def up(self, i: int) -> torch.Tensor:
        return self.shape.multiply("gate_up", self.layers["gate_up"][i], self.x, self.order, self.starts)

    def back(self, i: int) -> torch.Tensor:
        return self.shape.multiply("down", self.layers["down"][i], self.inner, self.order, self.starts)

    def add(self, _: int) -> torch.Tensor:
        return combine(self.answers, self.weights)

    def all(self, i: int) -> torch.Tensor:
        weights, order, starts = self.choose(i)
        inner = self.shape.multiply("gate_up", self.layers["gate_up"][i], self.x, order, starts)
        return combine(
            self.shape.multiply("down", self.layers["down"][i], inner, order, starts).view_as(self.answers), weights
        )

    def dense(self, weights: list[torch.Tensor], i: int) -> object:
        """The products of all pairs, as if they were routed to one expert."""
        return F.linear(self.rows, weights[0][i]), F.linear(self.inner, weights[1][i])


def bytes_of(weights: torch.Tensor | QuantizedWeight) -> int:
    """Of a layer's experts, scales included."""
    tensors = [weights.weight, weights.scale] if isinstance(weights, QuantizedWeight) else [weights]
    return sum(tensor.nbytes for tensor in tensors)


def tiles_of(text: str) -> Tiles:
    """Read "64,64,128,4,3"."""
    return tuple(map(int, text.split(",")))


def main() -> None:
    """Read the command line, measure each format."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--format", choices=FORMATS, nargs="+", default=["bf16"], help="of the weights (codes are made up)"
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--tiles", type=tiles_of, nargs="+", default=[None], help="measure these instead")
    args = parser.parse_args()
    rate = 1e6 * copy_bandwidth()
    print(f"copy {rate / 1e6:.2f} TB/s")
    for format in args.format:
        measure(Shape(format), args.tokens, rate, args.tiles)


def measure(shape: Shape, tokens_of: list[int], rate: float, all_tiles: list[Tiles | None]) -> None:
    """Print a row for each choice of tiles and number of tokens."""
    layers = {part: [shape.weights(part) for _ in range(LAYERS)] for part in ("gate_up", "down")}
    plain = [torch.randn(LAYERS, *size, dtype=torch.bfloat16, device="cuda") / 50
             for size in ((2 * shape.inner, shape.hidden), (shape.hidden, shape.inner))]  # fmt: skip
    each = sum(bytes_of(weights[0]) for weights in layers.values()) / shape.experts
    print(f"{shape.format:6s}  choose  gate_up    down  combine   layer  experts read  floor   dense  share")
    for tiles in all_tiles:
        for tokens in tokens_of:
            with using(tiles) if tiles else nullcontext():
                work = Work(shape, tokens, layers)
                times = [microseconds(part) for part in (work.choose, work.up, work.back, work.add, work.all)]
            read = int((work.starts.diff() > 0).sum())
            floor, dense = read * each / rate, microseconds(partial(work.dense, plain))
            print(
                f"{tokens:6d} {times[0]:7.1f} {times[1]:8.1f} {times[2]:7.1f} {times[3]:8.1f} {times[4]:7.1f} {read:13d} {floor:6.1f} "
                f"{dense:7.1f} {max(floor, dense) / (times[1] + times[2]):6.0%}   {','.join(map(str, tiles or ()))}", flush=True,
            )  # fmt: skip


if __name__ == "__main__":
    main()
