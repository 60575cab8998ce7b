"""Products with quantized weights: microseconds a layer, format by format, from one token to thousands.

    python -m tools.bench_weights            # on a machine with a CUDA GPU
    python -m tools.bench_weights --formats int4 --tokens 64 --tiles 64,64,128,4,3,0,132 64,128,128,8,3,128,264

The four products of a layer of Qwen3-4B and 0.6B, as the engine calls them (with few tokens norms, gate and residual ride
along), by each way that a format has: `few` (a kernel for 1, 2 and 4 tokens), `tiles` (tensor cores, unpacked on the way),
`hopper` (the same by wgmma, 129 to 256 tokens; on other cards it does not run), `unpacked` (once, then the library's product in
bfloat16), and of FP8 `both` (activations in FP8 too, `quantize_activations`). Graphs are captured over several layers, so that
no weight waits in the L2 cache; medians. The floor is the larger of two times: that of reading codes at the card's own copy
bandwidth, and that of computing at its own matrix rate. `--tiles` measures other tiles in place of the engine's: tokens,
outputs, inputs, warps, stages, most registers (0: as many as there are), programs.

Kernels are compiled first, by many processes at once, which leave them in Triton's cache; there each is compared with the
library's product, too.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from itertools import groupby
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
import triton

from folovllm.hopper.int4 import MANY, MOST, int4_hopper
from folovllm.kernels.skinny_linear import serves, skinny_linear
from folovllm.quantization.kernels import quant_matmul
from folovllm.quantization.kernels.quant_gemv import quant_gemv
from folovllm.quantization.kernels.quantize_rows import fp8_matmul
from folovllm.quantization.weight import QuantizedWeight
from tools.bench_attention import copy_bandwidth

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
Tiles = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Job:
    """A layer's products: one of `GEOMETRIES`, a format and one of its ways, so many tokens, and tiles that are not the engine's."""

    geometry: str
    format: str
    way: str
    tokens: int
    tiles: Tiles | None = None

    def engine_tiles(self) -> Any:
        """Within this context, the job's tiles are the engine's."""
        names = ("BM", "BN", "BK", "num_warps", "num_stages", "maxnreg", "programs")
        shape = {
            name: value for name, value in zip(names, self.tiles or (), strict=False) if name != "maxnreg" or value
        }
        return patch.object(quant_matmul, "tiles", (lambda *_: shape) if self.tiles else quant_matmul.tiles)

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


def step_of(job: Job, num_layers: int) -> Callable[[], None]:
    """Work that computes the products of some layers, one after the other."""
    layers, new = layers_of(job.geometry, job.format, num_layers), {"dtype": torch.bfloat16, "device": "cuda"}
    xs = {name: torch.randn(job.tokens, k, **new) for name, (_, k) in shapes_of(job.geometry).items()}
    residual = torch.zeros(job.tokens, GEOMETRIES[job.geometry][0], **new)

    def step() -> None:
        for layer in layers:
            for name, weight in layer.items():
                multiply(job, name, weight, xs[name], residual)

    return step


def error_of(job: Job) -> float:
    """How far a product is from that of the unpacked weight, as a share."""
    if job.way not in ("tiles", "hopper", "both") or job.tokens > 512:
        return 0.0
    (layer,) = layers_of(job.geometry, job.format, 1)
    x = torch.randn(job.tokens, shapes_of(job.geometry)["qkv"][1], dtype=torch.bfloat16, device="cuda")
    exact = by_library(x, quant_matmul.unpacked(layer["qkv"], x.dtype), None)
    return float((multiply(job, "qkv", layer["qkv"], x, x) - exact).float().norm() / exact.float().norm())


def microseconds(job: Job) -> float:
    """The median of a layer."""
    most = 2 if job.tokens > 512 else 1 << 30
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with (
        job.engine_tiles(),
        torch.cuda.stream(stream),
    ):  # `torch.cuda.graph` would empty torch's store of memory each time
        step = step_of(job, most)
        step()
        stream.synchronize()
        graph.capture_begin()
        step()
        graph.capture_end()
    torch.cuda.synchronize()
    milliseconds = triton.testing.do_bench(graph.replay, warmup=2, rep=8, return_mode="median")
    return float(milliseconds) * 1e3 / len(layers_of(job.geometry, job.format, most))


def compile_jobs(jobs: list[Job]) -> str:
    """Launch each kernel once, in a process that does nothing else, and look at what it computes. Says what is wrong."""
    wrong = []
    for job in jobs:
        try:
            with job.engine_tiles():
                step_of(job, 1)()
                error = error_of(job)
            if not error < (0.06 if job.way == "both" else 0.01):
                wrong.append(f"{job}: is wrong by {error:.2%}")
        except Exception as error:  # of this job alone
            wrong.append(f"{job}: {str(error)[:300]}")
    return "\n".join(wrong)


def compile_all(jobs: list[Job]) -> None:
    """Compile what the jobs need, and say what is wrong."""
    began, units = time.perf_counter(), defaultdict(list)
    for job in jobs:
        if (job.format, job.way) != ("bf16", "library"):
            units[job.geometry, job.format, job.way, job.tokens, job.tiles and job.tiles[:-1]].append(job)
    slow_first = sorted(units.values(), key=lambda unit: (unit[0].way != "few", -unit[0].tokens))
    with multiprocessing.get_context("fork").Pool(max(1, min(15, (os.cpu_count() or 1) - 1))) as pool:
        for failure in filter(None, pool.imap_unordered(compile_jobs, slow_first)):
            print(failure, flush=True)
    print(f"compiled {len(units)} kinds of work in {time.perf_counter() - began:.1f} s", flush=True)


def measured(jobs: Iterable[Job]) -> Iterator[tuple[Job, float]]:
    """Each job and its microseconds. What does not run is said."""
    for job in jobs:
        try:
            yield job, microseconds(job)
        except Exception as error:  # of this job alone
            print(f"{job}: {str(error)[:200]}", flush=True)


def matrix_rate() -> float:
    """Operations a microsecond of a product in bfloat16."""
    square = torch.randn(1 << 13, 1 << 13, dtype=torch.bfloat16, device="cuda")
    multiplied = triton.testing.do_bench(partial(torch.matmul, square, square), warmup=5, rep=40, return_mode="median")
    return 2 * 2.0**39 / multiplied / 1e3


def tiles_of(text: str) -> Tiles:
    """Read "64,64,128,4,3,0,132"."""
    tiles = tuple(map(int, text.split(",")))
    if len(tiles) != 7:
        raise ValueError
    return tiles


def main() -> None:
    """Print a line for each way (and each choice of tiles), with a column for each number of tokens."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--geometries", nargs="+", default=list(GEOMETRIES), choices=GEOMETRIES)
    parser.add_argument(
        "--formats", nargs="+", default=list(WAYS), choices=WAYS, metavar="FORMAT", help=", ".join(WAYS)
    )
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS))
    parser.add_argument("--tiles", nargs="+", type=tiles_of, default=[], help="measure these instead")
    args = parser.parse_args()
    if torch.version.cuda is None:
        sys.exit("this benchmark needs a CUDA GPU")
    jobs = [
        job
        for geometry in args.geometries
        for format in args.formats
        for way in (WAYS[format] if not args.tiles else ("tiles",) * ("tiles" in WAYS[format]))
        for tiles in args.tiles or [None]
        for tokens in args.tokens
        if (job := Job(geometry, format, way, tokens, tiles)).is_served
    ]
    compile_all(jobs)
    copy, multiplied = 1e6 * copy_bandwidth(), matrix_rate()
    print(f"copy {copy / 1e6:.2f} TB/s, bfloat16 {multiplied / 1e6:.0f} TFLOP/s; microseconds a layer, by tokens")
    print(" " * 26 + "".join(f"{count:9}" for count in args.tokens))
    for key, group in groupby(jobs, key=lambda job: (job.geometry, job.format, job.way, job.tiles)):
        by_tokens = {job.tokens: us for job, us in measured(group)}
        columns = "".join(f"{by_tokens[n]:9.1f}" if n in by_tokens else " " * 9 for n in args.tokens)
        print(
            "{:5}{:12}{:9}".format(*key) + columns + (f"   {','.join(map(str, key[3]))}" if key[3] else ""), flush=True
        )
    for geometry in args.geometries:
        weights = sum(a * b for a, b in shapes_of(geometry).values())
        for format, size in (("bf16", 2.0), ("8 bits", 1.0), ("int4", 0.516)):
            floors = [max(weights * size / copy, 2 * weights * n / multiplied) for n in args.tokens]
            print(f"{geometry:5}{format:12}{'floor':9}" + "".join(f"{us:9.1f}" for us in floors))


if __name__ == "__main__":
    main()
