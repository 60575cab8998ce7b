"""A layer of experts by itself: `python -m tools.bench_experts` on a machine with a CUDA GPU.

Qwen3-30B-A3B's geometry: 128 experts of 768, of which a token is routed to 8, hidden size 2,048. For each number of tokens it
prints the microseconds of each kernel in a captured graph, several layers in turn so that no weight is found in the L2 cache,
and of all four one after the other. Two bounds stand beside them. Few tokens can be no faster than the bytes of the experts that
are read, at the rate of a plain copy in the same run; many can be no faster than one dense product of the same size, which the
library computes.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F

from folovllm.electives.moe.kernels.grouped_linear import grouped_linear
from folovllm.electives.moe.kernels.route import choose, combine
from folovllm.electives.quantization.kernels.grouped_quant import grouped_quant
from folovllm.electives.quantization.weight import QuantizedWeight
from tools.gpu import card_rates, microseconds_a_call, parser_of, print_row

HIDDEN, INNER, EXPERTS, TOP_K = 2048, 768, 128, 8
SHAPES = {"gate_up": (2 * INNER, HIDDEN), "down": (HIDDEN, INNER)}  # [outputs, inputs] of an expert
TOKENS = (1, 2, 4, 16, 64, 256, 1024, 4096)
LAYERS = 6
CALLS = [*range(LAYERS)] * 4  # the layers in turn
FORMATS = ("bf16", "fp8", "int8", "int4")
Weights = torch.Tensor | QuantizedWeight


def weights_of(format: str, part: str) -> Weights:
    """Made-up weights of the experts of one layer, as the kernels take them."""
    outputs, inputs = EXPERTS * SHAPES[part][0], SHAPES[part][1]
    with torch.device("cuda"):
        if format == "bf16":
            return torch.randn(EXPERTS, *SHAPES[part], dtype=torch.bfloat16) * 0.02
        if format == "int4":
            words = torch.randint(-(2**31), 2**31 - 1, (outputs, inputs // 8), dtype=torch.int32)
            return QuantizedWeight(words, torch.full((outputs, inputs // 128), 0.005, dtype=torch.float16), 1, 128)
        rows, columns = (128, 128) if format == "fp8" else (1, inputs)
        scale = torch.full((outputs // rows, inputs // columns), 0.0005)
        codes = (torch.randn(outputs, inputs) * 40).clamp_(-127, 127)
    return QuantizedWeight(codes.to(torch.int8 if format == "int8" else torch.float8_e4m3fn), scale, rows, columns)


def bytes_of(weight: Weights) -> int:
    """What a product must read of it."""
    return weight.weight.nbytes + weight.scale.nbytes if isinstance(weight, QuantizedWeight) else weight.nbytes


class Work:
    """What a layer does for some tokens; each method takes the number of the layer."""

    def __init__(self, tokens: int, layers: dict[str, list[Weights]]) -> None:
        self.layers = layers
        draw = partial(torch.randn, dtype=torch.bfloat16, device="cuda")
        self.x, self.logits = draw(tokens, HIDDEN), draw(tokens, EXPERTS)
        self.weights, self.order, self.starts = self.choose(0)
        self.inner, self.rows = (draw(tokens * TOP_K, n) for n in (INNER, HIDDEN))
        self.answers = self.back(0).view(tokens, TOP_K, HIDDEN)

    def choose(self, _: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        weights, _experts, order, starts = choose(self.logits, TOP_K, True, range(EXPERTS))
        return weights, order, starts

    def up(self, i: int) -> torch.Tensor:
        return self.multiply("gate_up", i, self.x)

    def back(self, i: int) -> torch.Tensor:
        return self.multiply("down", i, self.inner)

    def add(self, _: int) -> torch.Tensor:
        return combine(self.answers, self.weights)

    def all(self, i: int) -> torch.Tensor:
        self.choose(i)
        return combine(self.multiply("down", i, self.up(i)).view_as(self.answers), self.weights)

    def dense(self, weights: list[torch.Tensor], i: int) -> object:
        """The products of all pairs, as if they were routed to one expert."""
        return F.linear(self.rows, weights[0][i]), F.linear(self.inner, weights[1][i])

    def multiply(self, part: str, i: int, x: torch.Tensor) -> torch.Tensor:
        """The product of all experts."""
        weights, gated = self.layers[part][i], part == "gate_up"
        if isinstance(weights, QuantizedWeight):
            return grouped_quant(x, weights, EXPERTS, self.order, self.starts, gated)
        return grouped_linear(x, weights, self.order, self.starts, gated)


def measure(format: str, tokens_of: list[int], rate: float) -> None:
    """Print a row for each number of tokens."""
    layers = {part: [weights_of(format, part) for _ in range(LAYERS)] for part in SHAPES}
    plain = [torch.randn(LAYERS, *shape, dtype=torch.bfloat16, device="cuda") / 50 for shape in SHAPES.values()]
    each = sum(bytes_of(weights[0]) for weights in layers.values()) / EXPERTS
    titles = "choose", "gate_up", "down", "combine", "layer", "experts read", "floor", "dense", "share"
    print_row(f"{format}, us", *titles)
    for tokens in tokens_of:
        work = Work(tokens, layers)
        parts = [microseconds_a_call(part, CALLS) for part in (work.choose, work.up, work.back, work.add, work.all)]
        read, dense = int((work.starts.diff() > 0).sum()), microseconds_a_call(partial(work.dense, plain), CALLS)
        floor = 1e6 * read * each / rate
        print_row(f"{tokens}", *parts, read, floor, dense, f"{max(floor, dense) / (parts[1] + parts[2]):.0%}")


def main() -> None:
    """Read the command line, measure each format."""
    parser = parser_of(__doc__)
    parser.add_argument("--format", choices=FORMATS, nargs="+", default=["bf16"], help="of the made-up weights")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    args = parser.parse_args()
    rate = card_rates().copy
    for format in args.format:
        measure(format, args.tokens, rate)


if __name__ == "__main__":
    main()
