"""Products with weights of fewer bits: microseconds a layer, format by format, from one token to thousands.

    python -m tools.bench_weights            # on a machine with a CUDA GPU
    python -m tools.bench_weights --tiles    # and which tiles are best

The four products of a layer of Qwen3-4B and 0.6B, as the engine calls them (with few tokens norms, gate and residual ride
along), by each way that a format has: `few` (a kernel for 1, 2 and 4 tokens), `tiles` (tensor cores, unpacked on the way),
`unpacked` (once, then the library's product in bfloat16), and of FP8 `both` (activations in FP8 too, `quantize_activations`). Graphs are
captured over several layers, so that no weight waits in the L2 cache; medians. The floor is the larger of two times: that of
reading codes at the card's own copy bandwidth, and that of computing at its own matrix rate.

Kernels are compiled first, by many processes at once, which leave them in Triton's cache.
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
from unittest.mock import patch

import torch
import torch.nn.functional as F
import triton

from folovllm.kernels import int4_matmul as four
from folovllm.kernels import quant_matmul as eight
from folovllm.kernels.few_codes import few_codes
from folovllm.kernels.quant_linear import Codes, quant_linear
from folovllm.kernels.quantize_rows import fp8_matmul
from folovllm.kernels.small_linear import serves, small_linear

GEOMETRIES = {"4B": (2560, 6144, 4096, 9728), "0.6B": (1024, 4096, 2048, 3072)}  # hidden, qkv, heads, MLP
TOKENS = (1, 2, 4, 8, 16, 64, 128, 256, 512, 2048, 8192)
WAYS = {
    "bf16": ("library", "few"),
    "fp8 channel": ("few", "tiles", "unpacked", "both"),
    "fp8 block": ("few", "tiles", "unpacked", "both"),
    "int8": ("few", "tiles", "unpacked"),
    "int4": ("few", "tiles", "unpacked"),
    "int4 zeros": ("few", "tiles", "unpacked"),
}
LARGER_THAN_L2 = 160 << 20  # bytes of weights to go through
EPS = 1e-6

# Candidates by the most tokens that they are for.
TILES_8 = {
    16: [(16, 64, 128, 4, 4, 0), (16, 64, 128, 4, 6, 0), (16, 32, 128, 2, 4, 0)],
    64: [(64, 64, 128, 4, 3, 0), (64, 64, 64, 4, 4, 128), (64, 128, 64, 8, 4, 128)],
    128: [(128, 128, 64, 8, 3, 0), (128, 64, 64, 4, 4, 168), (64, 128, 64, 8, 4, 128), (64, 64, 128, 4, 3, 128),
          (128, 128, 128, 8, 2, 0)],
}  # fmt: skip
TILES_4 = {
    16: [(16, 64, 16, 4, 3, 0), (16, 64, 16, 4, 5, 0), (16, 128, 16, 8, 3, 0)],
    64: [(64, 64, 16, 4, 3, 0), (64, 64, 16, 4, 3, 128), (64, 128, 16, 8, 3, 128)],
    128: [(128, 64, 16, 4, 2, 168), (128, 128, 16, 8, 3, 0), (64, 64, 16, 4, 3, 128), (64, 128, 16, 8, 3, 128)],
}  # fmt: skip
PROGRAMS = (132, 264)


@dataclass(frozen=True, slots=True)
class Job:
    """A layer's products: one of `GEOMETRIES`, one of `WAYS`, so many tokens, and tiles that are not the engine's."""

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
            "WORDS" if self.format.startswith("int4") else "BK",
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
        return words, scales, zeros
    rows, columns = (128, 128) if format == "fp8 block" else (1, inputs)
    scale = torch.full((outputs // rows, inputs // columns), 0.0005, **cuda)
    codes = (torch.randn(outputs, inputs, **cuda) * 40).clamp_(-127, 127)
    return Codes(codes.to(torch.int8 if format == "int8" else torch.float8_e4m3fn), scale, rows, columns)


def bytes_of(weight: object) -> int:
    """What a product must read of it."""
    if isinstance(weight, Codes):
        return weight.weight.nbytes + weight.scale.nbytes
    return sum(t.nbytes for t in (weight if isinstance(weight, tuple) else (weight,)) if t is not None)


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
        return small_linear(x, weight, *fused) if job.way == "few" else by_library(x, weight, added)
    if isinstance(weight, Codes):
        ways = {"few": partial(quant_linear, x, weight, *fused), "tiles": partial(eight.quant_matmul, x, weight, added),
                "both": partial(both_fp8, x, weight, added)}  # fmt: skip
        return ways[job.way]() if job.way in ways else by_library(x, eight.unpacked(weight, x.dtype), added)
    ways = {
        "few": partial(few_codes, x, *weight, (1, 128), "int4", *fused),
        "tiles": partial(four.int4_matmul, x, *weight, added),
    }
    return ways[job.way]() if job.way in ways else by_library(x, four.unpacked(*weight, x.dtype), added)


def by_library(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
    """The product in bfloat16."""
    return F.linear(x, weight) if residual is None else residual.addmm_(x, weight.t())


def both_fp8(x: torch.Tensor, codes: Codes, residual: torch.Tensor | None) -> torch.Tensor:
    """The product of FP8 with FP8."""
    y = fp8_matmul(x, codes)
    return y if residual is None else residual.add_(y)


def step_of(job: Job, num_layers: int) -> Callable[[], None]:
    """The products of some layers, one after the other; and how many layers there are."""
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
    module, name = (four, "tiling") if job.format.startswith("int4") else (eight, "tiles")
    return patch.object(module, name, (lambda *_: job.shape()) if job.tiles else getattr(module, name))


def microseconds(job: Job) -> float:
    """The median of a layer."""
    most = 2 if job.tokens > 512 else 1 << 30
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with with_tiles(job), torch.cuda.stream(stream):  # `torch.cuda.graph` would empty torch's store of memory each time
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
            with with_tiles(job):
                step_of(job, 1)()
                error = error_of(job)
            if not error < (0.06 if job.way == "both" else 0.01):
                wrong.append(f"{job}: is wrong by {error:.2%}")
        except Exception as error:  # of this job alone
            wrong.append(f"{job}: {str(error)[:300]}")
    return "\n".join(wrong)


def error_of(job: Job) -> float:
    """How far a product is from that of the unpacked weight, as a share."""
    if job.way not in ("tiles", "both") or job.tokens > 512:
        return 0.0
    (layer,) = layers_of(job.geometry, job.format, 1)
    weight, (_, width) = layer["qkv"], shapes_of(job.geometry)["qkv"]
    x = torch.randn(job.tokens, width, dtype=torch.bfloat16, device="cuda")
    exact = by_library(
        x, eight.unpacked(weight, x.dtype) if isinstance(weight, Codes) else four.unpacked(*weight, x.dtype), None
    )
    return float((multiply(job, "qkv", weight, x, x) - exact).float().norm() / exact.float().norm())


def compiles(job: Job) -> bool:
    """Whether it has kernels of ours."""
    return (job.format, job.way) != ("bf16", "library")


def serves_all(job: Job) -> bool:
    """Whether the way is one for so many tokens."""
    if job.way == "few" and job.format == "bf16":
        return all(serves(job.tokens, torch.empty(shape, device="meta")) for shape in shapes_of(job.geometry).values())
    return {"few": job.tokens in (1, 2, 4), "tiles": 4 < job.tokens <= 1024, "unpacked": job.tokens >= 64,
            "both": job.tokens > 4, "library": True}[job.way]  # fmt: skip


def default_jobs(geometries: list[str], formats: list[str], tokens: list[int]) -> Iterator[Job]:
    """Every way of every format."""
    for geometry in geometries:
        for format in formats:
            for way in WAYS[format]:
                yield from filter(serves_all, (Job(geometry, format, way, count) for count in tokens))


def tile_jobs(geometries: list[str], formats: list[str], tokens: list[int]) -> Iterator[Job]:
    """Candidates."""
    for format in formats:
        if "tiles" in WAYS[format]:
            for count, candidates in (TILES_4 if format.startswith("int4") else TILES_8).items():
                for geometry in (one for one in geometries if count in tokens and (one == "4B" or count == 128)):
                    for tile in candidates:
                        for programs in PROGRAMS:
                            yield Job(geometry, format, "tiles", count, (*tile, programs))


def compile_all(jobs: list[Job]) -> None:
    """Compile what the jobs need, and say what is wrong."""
    began, units = time.perf_counter(), defaultdict(list)
    for job in filter(compiles, jobs):
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


def rates() -> tuple[float, float]:
    """Bytes that a copy moves, and operations of a product in bfloat16, both a microsecond."""
    source = torch.randn(1 << 29, dtype=torch.bfloat16, device="cuda")
    target, square = torch.empty_like(source), source[: 1 << 26].view(1 << 13, 1 << 13)
    copied = triton.testing.do_bench(lambda: target.copy_(source), warmup=5, rep=40, return_mode="median")
    multiplied = triton.testing.do_bench(partial(torch.matmul, square, square), warmup=5, rep=40, return_mode="median")
    return 2 * source.nbytes / copied / 1e3, 2 * 2.0**39 / multiplied / 1e3


def main() -> None:
    """Print a line for each way, with a column for each number of tokens."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiles", action="store_true", help="measure candidates for tiles too")
    parser.add_argument("--geometries", nargs="+", default=list(GEOMETRIES))
    parser.add_argument("--formats", nargs="+", default=list(WAYS))
    parser.add_argument("--tile-formats", nargs="+", default=["fp8 block", "int4"])
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS))
    args = parser.parse_args()
    jobs = list(default_jobs(args.geometries, args.formats, args.tokens))
    tried = list(tile_jobs(args.geometries, args.tile_formats, args.tokens)) if args.tiles else []
    compile_all(tried + jobs)
    copy, multiply_ = rates()
    print(f"copy {copy / 1e6:.2f} TB/s, bfloat16 {multiply_ / 1e6:.0f} TFLOP/s; microseconds a layer, by tokens")
    print(" " * 26 + "".join(f"{count:9}" for count in args.tokens))
    for key, group in groupby(jobs, key=lambda job: (job.geometry, job.format, job.way)):
        by_tokens = {job.tokens: us for job, us in measured(group)}
        columns = "".join(f"{by_tokens[n]:9.1f}" if n in by_tokens else " " * 9 for n in args.tokens)
        print("{:5}{:12}{:9}".format(*key) + columns, flush=True)
    for geometry in args.geometries:
        weights = sum(a * b for a, b in shapes_of(geometry).values())
        for format, size in (("bf16", 2.0), ("8 bits", 1.0), ("int4", 0.516)):
            floors = [max(weights * size / copy, 2 * weights * n / multiply_) for n in args.tokens]
            print(f"{geometry:5}{format:12}{'floor':9}" + "".join(f"{us:9.1f}" for us in floors))
    for key, group in groupby(tried, key=lambda job: (job.format, job.geometry, job.tokens)):
        candidates = sorted((us, job.tiles) for job, us in measured(group))
        print(*key, "  ".join(f"{us:.1f} {','.join(map(str, tile))}" for us, tile in candidates), flush=True)


if __name__ == "__main__":
    if torch.version.cuda is None:
        sys.exit("this benchmark needs a CUDA GPU")
    main()
