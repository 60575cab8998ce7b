"""Products with weights of fewer bits: microseconds a layer, format by format, from one token to thousands.

    python -m tools.bench_weights            # on a machine with a CUDA GPU
    python -m tools.bench_weights --tiles    # and which tiles are best

The four products of a layer of Qwen3-4B and 0.6B, as the engine calls them (with few tokens norms, gate and residual ride
along), by each way that a format has: `few` (a kernel for 1, 2 and 4 tokens), `tiles` (tensor cores, unpacked on the way),
`hopper` (the same by wgmma, 129 to 256 tokens; on other cards it does not run), `unpacked` (once, then the library's product in
bfloat16), and of FP8 `both` (activations in FP8 too, `quantize_activations`). Graphs are captured over several layers, so that
no weight waits in the L2 cache; medians. The floor is the larger of two times: that of reading codes at the card's own copy
bandwidth, and that of computing at its own matrix rate.

Kernels are compiled first, by many processes at once, which leave them in Triton's cache.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import groupby

import torch
import triton

from folovllm.hopper.int4 import MANY, MOST
from folovllm.kernels.skinny_linear import serves
from tools.weight_products import GEOMETRIES, Job, error_of, layers_of, shapes_of, step_of, with_tiles

TOKENS = (1, 2, 4, 8, 16, 64, 128, 256, 512, 2048, 8192)
WAYS = {
    "bf16": ("library", "few"),
    "fp8 channel": ("few", "tiles", "unpacked", "both"),
    "fp8 block": ("few", "tiles", "unpacked", "both"),
    "int8": ("few", "tiles", "unpacked"),
    "int4": ("few", "tiles", "hopper", "unpacked"),
    "int4 zeros": ("few", "tiles", "hopper", "unpacked"),
}

# Candidates by the most tokens that they are for.
TILES_8 = {
    16: [(16, 64, 128, 4, 4, 0), (16, 64, 128, 4, 6, 0), (16, 32, 128, 2, 4, 0)],
    64: [(64, 64, 128, 4, 3, 0), (64, 64, 64, 4, 4, 128), (64, 128, 64, 8, 4, 128)],
    128: [(128, 128, 64, 8, 3, 0), (128, 64, 64, 4, 4, 168), (64, 128, 64, 8, 4, 128), (64, 64, 128, 4, 3, 128),
          (128, 128, 128, 8, 2, 0)],
}  # fmt: skip
TILES_4 = {
    16: [(16, 64, 128, 4, 3, 0), (16, 64, 128, 4, 5, 0), (16, 128, 128, 8, 3, 0)],
    64: [(64, 64, 128, 4, 3, 0), (64, 64, 128, 4, 3, 128), (64, 128, 128, 8, 3, 128)],
    128: [(128, 64, 128, 4, 2, 168), (128, 128, 128, 8, 3, 0), (64, 64, 128, 4, 3, 128), (64, 128, 128, 8, 3, 128)],
}  # fmt: skip
PROGRAMS = (132, 264)


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


def compiles(job: Job) -> bool:
    """Whether it has kernels of ours."""
    return (job.format, job.way) != ("bf16", "library")


def serves_all(job: Job) -> bool:
    """Whether the way is one for so many tokens."""
    if job.way == "few" and job.format == "bf16":
        return all(serves(job.tokens, torch.empty(shape, device="meta")) for shape in shapes_of(job.geometry).values())
    return {"few": job.tokens in (1, 2, 4), "tiles": 4 < job.tokens <= 1024, "unpacked": job.tokens >= 64,
            "hopper": MANY <= job.tokens <= MOST, "both": job.tokens > 4, "library": True}[job.way]  # fmt: skip


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
