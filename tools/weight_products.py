"""The four products of a layer with weights of fewer bits, in each way that a format has: what `bench_weights` measures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from unittest.mock import patch

import torch
import torch.nn.functional as F

from folovllm.hopper.int4 import int4_hopper
from folovllm.kernels.skinny_linear import skinny_linear
from folovllm.quantization.kernels import quant_matmul
from folovllm.quantization.kernels.quant_gemv import quant_gemv
from folovllm.quantization.kernels.quantize_rows import fp8_matmul
from folovllm.quantization.weight import QuantizedWeight

GEOMETRIES = {"4B": (2560, 6144, 4096, 9728), "0.6B": (1024, 4096, 2048, 3072)}  # hidden, qkv, heads, MLP
LARGER_THAN_L2 = 160 << 20  # bytes of weights to go through
EPS = 1e-6


@dataclass(frozen=True, slots=True)
class Job:
    """A layer's products: one of `GEOMETRIES`, a format and one of its ways, so many tokens, and tiles that are not the engine's."""

    geometry: str
    format: str
    way: str
    tokens: int
    tiles: tuple[int, ...] | None = None

    def shape(self) -> dict[str, int]:
        """The tiles as the engine's own function has them."""
        assert self.tiles is not None
        names = (
            "BM",
            "BN",
            "BK",
            "num_warps",
            "num_stages",
            "maxnreg",
            "programs",
        )
        shape = dict(zip(names, self.tiles, strict=True))
        return {name: value for name, value in shape.items() if name != "maxnreg" or value}


def shapes_of(geometry: str) -> dict[str, tuple[int, int]]:
    """[outputs, inputs] of each product."""
    hidden, qkv, heads, mlp = GEOMETRIES[geometry]
    return {"qkv": (qkv, hidden), "o": (hidden, heads), "gate_up": (2 * mlp, hidden), "down": (hidden, mlp)}


def weight_of(format: str, outputs: int, inputs: int) -> object:
    """Made-up weights as the kernels take them."""
    cuda = {"device": "cuda"}
    if format == "bf16":
        return torch.randn(outputs, inputs, dtype=torch.bfloat16, **cuda) * 0.02
    if format.startswith("int4"):
        words = torch.randint(-(2**31), 2**31 - 1, (outputs, inputs // 8), dtype=torch.int32, **cuda)
        scales = torch.full((outputs, inputs // 128), 0.005, dtype=torch.float16, **cuda)
        zeros = torch.randint(0, 16, scales.shape, dtype=torch.uint8, **cuda) if format == "int4 zeros" else None
        return QuantizedWeight(words, scales, 1, 128, zeros)
    rows, columns = (128, 128) if format == "fp8 block" else (1, inputs)
    scale = torch.full((outputs // rows, inputs // columns), 0.0005, **cuda)
    codes = (torch.randn(outputs, inputs, **cuda) * 40).clamp_(-127, 127)
    return QuantizedWeight(codes.to(torch.int8 if format == "int8" else torch.float8_e4m3fn), scale, rows, columns)


def bytes_of(weight: object) -> int:
    """What a product must read of it."""
    if isinstance(weight, QuantizedWeight):
        return sum(t.nbytes for t in (weight.weight, weight.scale, weight.zeros) if t is not None)
    assert isinstance(weight, torch.Tensor)
    return weight.nbytes


@cache
def layers_of(geometry: str, format: str, most: int) -> list[dict[str, object]]:
    """As many layers as the L2 cache does not hold, and at most `most`."""

    def layer() -> dict[str, object]:
        return {name: weight_of(format, *shape) for name, shape in shapes_of(geometry).items()}

    first = layer()
    return [first, *(layer() for _ in range(min(most - 1, LARGER_THAN_L2 // sum(map(bytes_of, first.values())))))]


def multiply(job: Job, name: str, weight: object, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    """One product, in the job's way."""
    added, normed = residual if name in ("o", "down") else None, EPS if name in ("qkv", "gate_up") else None
    fused = (normed, name == "gate_up", added)
    if job.format == "bf16":
        return skinny_linear(x, weight, *fused) if job.way == "few" else by_library(x, weight, added)
    assert isinstance(weight, QuantizedWeight)
    ways = {
        "few": partial(quant_gemv, x, weight, *fused),
        "tiles": partial(quant_matmul.quant_matmul, x, weight, added),
        "hopper": partial(int4_hopper, x, weight.weight, weight.scale, weight.zeros, added),
        "both": partial(both_fp8, x, weight, added),
    }
    return ways[job.way]() if job.way in ways else by_library(x, quant_matmul.unpacked(weight, x.dtype), added)


def by_library(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
    """The product in bfloat16."""
    return F.linear(x, weight) if residual is None else residual.addmm_(x, weight.t())


def both_fp8(x: torch.Tensor, codes: QuantizedWeight, residual: torch.Tensor | None) -> torch.Tensor:
    """The product of FP8 with FP8."""
    y = fp8_matmul(x, codes)
    return y if residual is None else residual.add_(y)


def step_of(job: Job, num_layers: int) -> Callable[[], None]:
    """Work that computes the products of some layers, one after the other."""
    layers = layers_of(job.geometry, job.format, num_layers)
    xs = {
        name: torch.randn(job.tokens, k, dtype=torch.bfloat16, device="cuda")
        for name, (_, k) in shapes_of(job.geometry).items()
    }
    residual = torch.zeros(job.tokens, GEOMETRIES[job.geometry][0], dtype=torch.bfloat16, device="cuda")

    def step() -> None:
        for layer in layers:
            for name, weight in layer.items():
                multiply(job, name, weight, xs[name], residual)

    return step


def with_tiles(job: Job) -> patch:
    """Within this, the job's tiles are the engine's."""
    return patch.object(quant_matmul, "tiles", (lambda *_: job.shape()) if job.tiles else quant_matmul.tiles)


def error_of(job: Job) -> float:
    """How far a product is from that of the unpacked weight, as a share."""
    if job.way not in ("tiles", "hopper", "both") or job.tokens > 512:
        return 0.0
    (layer,) = layers_of(job.geometry, job.format, 1)
    weight, (_, width) = layer["qkv"], shapes_of(job.geometry)["qkv"]
    x = torch.randn(job.tokens, width, dtype=torch.bfloat16, device="cuda")
    assert isinstance(weight, QuantizedWeight)
    exact = by_library(x, quant_matmul.unpacked(weight, x.dtype), None)
    return float((multiply(job, "qkv", weight, x, x) - exact).float().norm() / exact.float().norm())
