"""Products with quantized weights: microseconds a layer, format by format, from one token to thousands.

    python -m tools.bench_weights --formats bf16 int4 --tokens 1 64    # on a machine with a CUDA GPU

The four products of a layer of Qwen3-4B and 0.6B, as the engine calls them (with few tokens norms, gate and residual ride
along), by each way that a format has: `few` (a kernel for 1, 2 and 4 tokens), `tiles` (tensor cores, unpacked on the way),
`hopper` (the same by wgmma, 129 to 256 tokens; on other cards it does not run), `unpacked` (once, then the library's product in
bfloat16), and of FP8 `both` (activations in FP8 too, `quantize_activations`). Graphs are captured over several layers, so that
no weight waits in the L2 cache; medians. The floor is the larger of two times: that of reading codes at the card's own copy
bandwidth, and that of computing at its own matrix rate. The first run also compiles all kernels, which takes minutes.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F

from folovllm.bench.roofline import Rates
from folovllm.hopper.int4 import MANY, MOST, int4_hopper
from folovllm.kernels.skinny_linear import serves, skinny_linear
from folovllm.quantization.kernels import quant_matmul
from folovllm.quantization.kernels.quant_gemv import quant_gemv
from folovllm.quantization.kernels.quantize_rows import fp8_matmul
from folovllm.quantization.weight import QuantizedWeight
from tools.gpu import card_rates, microseconds

GEOMETRIES = {"4B": (2560, 6144, 4096, 9728), "0.6B": (1024, 4096, 2048, 3072)}  # hidden, qkv, heads, MLP
TOKENS = (1, 2, 4, 8, 16, 64, 128, 256, 512, 2048, 8192)
WAYS = {
    "bf16": ("library", "few"),
    "fp8 channel": ("few", "tiles", "unpacked", "both"),
    "fp8 block": ("few", "tiles", "unpacked", "both"),
    "int8": ("few", "tiles", "unpacked"),
    "int4": ("few", "tiles", "hopper", "unpacked"),
    "int4 zeros": ("few", "tiles", "hopper", "unpacked"),
}
LARGER_THAN_L2 = 160 << 20  # bytes of weights to go through
EPS = 1e-6


@dataclass(frozen=True, slots=True)
class Job:
    """A layer's products: one of `GEOMETRIES`, a format and one of its ways, and so many tokens."""

    geometry: str
    format: str
    way: str
    tokens: int

    @property
    def is_served(self) -> bool:
        """Whether the way is one for so many tokens."""
        n = self.tokens
        if self.way == "few" and self.format == "bf16":
            return all(serves(n, torch.empty(shape, device="meta")) for shape in shapes_of(self.geometry).values())
        return {"few": n in (1, 2, 4), "tiles": 4 < n <= 1024, "unpacked": n >= 64, "hopper": MANY <= n <= MOST, "both": n > 4,
                "library": True}[self.way]  # fmt: skip


def shapes_of(geometry: str) -> dict[str, tuple[int, int]]:
    """[outputs, inputs] of each product."""
    hidden, qkv, heads, mlp = GEOMETRIES[geometry]
    return {"qkv": (qkv, hidden), "o": (hidden, heads), "gate_up": (2 * mlp, hidden), "down": (hidden, mlp)}


def weight_of(format: str, outputs: int, inputs: int) -> torch.Tensor | QuantizedWeight:
    """Made-up weights as the kernels take them."""
    with torch.device("cuda"):
        if format == "bf16":
            return torch.randn(outputs, inputs, dtype=torch.bfloat16) * 0.02
        if format.startswith("int4"):
            words = torch.randint(-(2**31), 2**31 - 1, (outputs, inputs // 8), dtype=torch.int32)
            scales = torch.full((outputs, inputs // 128), 0.005, dtype=torch.float16)
            zeros = torch.randint(0, 16, scales.shape, dtype=torch.uint8) if format == "int4 zeros" else None
            return QuantizedWeight(words, scales, 1, 128, zeros)
        rows, columns = (128, 128) if format == "fp8 block" else (1, inputs)
        scale = torch.full((outputs // rows, inputs // columns), 0.0005)
        codes = (torch.randn(outputs, inputs) * 40).clamp_(-127, 127)
    return QuantizedWeight(codes.to(torch.int8 if format == "int8" else torch.float8_e4m3fn), scale, rows, columns)


def bytes_of(weight: torch.Tensor | QuantizedWeight) -> int:
    """What a product must read of it."""
    parts = [weight.weight, weight.scale, weight.zeros] if isinstance(weight, QuantizedWeight) else [weight]
    return sum(part.nbytes for part in parts if part is not None)


@cache
def layers_of(geometry: str, format: str, most: int) -> list[dict[str, Any]]:
    """As many layers as the L2 cache does not hold, and at most `most`."""

    def layer() -> dict[str, Any]:
        return {name: weight_of(format, *shape) for name, shape in shapes_of(geometry).items()}

    first = layer()
    return [first, *(layer() for _ in range(min(most - 1, LARGER_THAN_L2 // sum(map(bytes_of, first.values())))))]


def multiply(job: Job, name: str, weight: Any, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    """One product, in the job's way."""
    added, normed = residual if name in ("o", "down") else None, EPS if name in ("qkv", "gate_up") else None
    fused = (normed, name == "gate_up", added)
    if job.format == "bf16":
        return skinny_linear(x, weight, *fused) if job.way == "few" else by_library(x, weight, added)
    ways: dict[str, Callable[[], torch.Tensor]] = {
        "few": lambda: quant_gemv(x, weight, *fused),
        "tiles": lambda: quant_matmul.quant_matmul(x, weight, added),
        "hopper": lambda: int4_hopper(x, weight.weight, weight.scale, weight.zeros, added),
        "unpacked": lambda: by_library(x, quant_matmul.unpacked(weight, x.dtype), added),
        "both": lambda: fp8_matmul(x, weight) if added is None else added.add_(fp8_matmul(x, weight)),
    }
    return ways[job.way]()


def by_library(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
    """The product in bfloat16."""
    return F.linear(x, weight) if residual is None else residual.addmm_(x, weight.t())


def step_of(job: Job, layers: list[dict[str, Any]]) -> Callable[[], None]:
    """Work that computes the products of some layers, one after the other."""
    new: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda"}
    xs = {name: torch.randn(job.tokens, k, **new) for name, (_, k) in shapes_of(job.geometry).items()}
    residual = torch.zeros(job.tokens, GEOMETRIES[job.geometry][0], **new)

    def step() -> None:
        for layer in layers:
            for name, weight in layer.items():
                multiply(job, name, weight, xs[name], residual)

    return step


def microseconds_a_layer(job: Job) -> float:
    """The median of a layer; NaN where the way does not serve so many tokens, or does not run on this card."""
    if not job.is_served:
        return float("nan")
    layers = layers_of(job.geometry, job.format, 2 if job.tokens > 512 else 1 << 30)
    try:
        return microseconds(step_of(job, layers)) / len(layers)
    except Exception as error:  # of this job alone
        print(f"{job}: {str(error)[:200]}", flush=True)
        return float("nan")


def bench(geometry: str, formats: list[str], tokens: list[int], rates: Rates) -> None:
    """Print a line for each way of each format, and the floors."""
    for format in formats:
        for way in WAYS[format]:
            times = [microseconds_a_layer(Job(geometry, format, way, n)) for n in tokens]
            print(f"{geometry:5}{format:12}{way:9}" + "".join(f"{us:9.1f}" for us in times), flush=True)
        layers_of.cache_clear()
    weights = sum(a * b for a, b in shapes_of(geometry).values())
    for format, size in (("bf16", 2.0), ("8 bits", 1.0), ("int4", 0.516)):
        floors = [1e6 * max(weights * size / rates.copy, 2 * weights * n / rates.matmul) for n in tokens]
        print(f"{geometry:5}{format:12}{'floor':9}" + "".join(f"{us:9.1f}" for us in floors))


def main() -> None:
    """Print a line for each way, with a column for each number of tokens."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--geometries", nargs="+", default=list(GEOMETRIES), choices=GEOMETRIES)
    parser.add_argument(
        "--formats", nargs="+", default=list(WAYS), choices=WAYS, metavar="FORMAT", help=", ".join(WAYS)
    )
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS))
    args = parser.parse_args()
    rates = card_rates()
    print(" " * 26 + "".join(f"{count:9}" for count in args.tokens))
    for geometry in args.geometries:
        bench(geometry, args.formats, args.tokens, rates)


if __name__ == "__main__":
    main()
