"""Tensor parallelism measured: is it right, how fast is a sum, how do throughput and latency scale.

    python tools/bench_tp.py --sizes 1,2 --out docs/data/tp          # on a machine with two GPUs
    python tools/bench_tp.py --sizes 1,2 --device cpu --geometries none --requests 4   # a dry run

It writes JSON files and prints tables. Weights are random (the check uses the embedded model as well), so nothing is
downloaded. `--geometries none` leaves the long part out. How long a step's sums take is seen by a profiler in one of its
ranks, with one sequence; `collectives.json` has single sums of several sizes, alone in a captured graph.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from folovllm import LLM, SamplingParams
from folovllm.bench.contenders import parse_contenders, random_model
from folovllm.bench.report import Result, show
from folovllm.bench.throughput import bench_latency, bench_throughput

if TYPE_CHECKING:
    from folovllm.distributed.group import ProcessGroup

SHAPES = ((1, 1024), (1, 4096), (16, 4096), (64, 4096), (256, 1024), (256, 4096), (4096, 4096))  # [tokens, H]
PRODUCTS = ((2560, 4096), (2560, 9728), (4096, 4096), (4096, 12288))  # [outputs, inputs]: o and down of Qwen3-4B and 8B
CALLS = 72  # all-reduces of a step of 36 layers
STEPS = 32  # under the profiler


# --- is it right -------------------------------------------------------------------------------------------------------


def check(sizes: list[int], device: str, count: int, model: dict[str, Any]) -> list[dict[str, Any]]:
    """Tokens and log-probabilities of several ranks beside those of one, with graphs and overlap, in float32.

    `same` counts tokens before the first that differs; log-probabilities are compared as far as that.
    """
    answers = {size: answers_of(size, device, count, model) for size in (1, *(size for size in sizes if size > 1))}
    rows = []
    for size in sizes:
        same = total = 0
        difference = 0.0
        for (mine, own), (reference, theirs) in zip(answers[size], answers[1], strict=True):
            equal = next((i for i, (a, b) in enumerate(zip(mine, reference, strict=True)) if a != b), len(mine))
            same, total = same + equal, total + len(mine)
            pairs = zip(own[:equal], theirs[:equal], strict=False)
            difference = max(difference, *(abs(a - b) for a, b in pairs), 0.0)
        rows.append(
            {"size": size, "tokens": total, "same": same, "largest difference of a log-probability": difference}
        )
    return [row for row in rows if row["size"] > 1]


def answers_of(size: int, device: str, count: int, model: dict[str, Any]) -> list[tuple[list[int], list[float]]]:
    """Token ids, and log-probabilities of every fourth answer: greedy, drawn, filtered."""
    params = [
        SamplingParams(
            max_tokens=64, ignore_eos=True, seed=i, temperature=0.8 * (i % 2), top_p=(1.0, 0.9)[i % 4 == 3],
            logprobs=(None, 0)[i % 4 == 2],
        )
        for i in range(count)
    ]  # fmt: skip
    prompts = [[(7 * i + j * (i + 1)) % 4000 for j in range(5 + 11 * i)] for i in range(count)]
    fields = {"max_model_len": 1024, "max_num_seqs": 16, "use_tqdm": False, "dtype": "float32", "device": device}
    with LLM(**{**model, **fields, "tensor_parallel_size": size}) as llm:
        outputs = [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]
    tidy()
    return [
        (out.token_ids, [next(iter(row.values())).logprob for row in out.logprobs] if out.logprobs is not None else [])
        for out in outputs
    ]


def tidy() -> None:
    """Give back what an engine in this process had: the next one measures what is free."""
    gc.unfreeze()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# --- how long does a sum take ------------------------------------------------------------------------------------------


def on_ranks(size: int, *arguments: str) -> None:
    """Run this very file in `size` processes that torchrun starts."""
    from folovllm.distributed.group import child_environment

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    where = ["--nnodes=1", f"--nproc-per-node={size}", "--master-addr=127.0.0.1", f"--master-port={port}"]
    command = [sys.executable, "-m", "torch.distributed.run", *where, __file__, *arguments]
    subprocess.run(command, check=True, env=child_environment())


def collectives(path: Path) -> None:
    """One of several ranks: microseconds of one sum in a captured graph, ours and NCCL's. Rank 0 writes JSON."""
    import torch.distributed as dist

    from folovllm.distributed.group import ProcessGroup

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    group = ProcessGroup(rank, size, torch.device("cuda", rank))
    rows = []
    for shape in SHAPES:
        x = torch.zeros(shape, dtype=torch.bfloat16, device="cuda")
        row: dict[str, Any] = {"size": size, "shape": shape, "bytes": x.nbytes, "one_shot": group.takes_short_way(x)}
        row["ours_us"] = 1e6 * seconds_of_a_call(lambda x=x: group.all_reduce(x))
        row["nccl_us"] = 1e6 * seconds_of_a_call(lambda x=x: dist.all_reduce(x))
        rows.append(row)
    products = [product_and_sum(group, tokens, *shape) for tokens in (1, 2, 4) for shape in PRODUCTS]
    best = torch.zeros(2, 1, dtype=torch.int32, device="cuda")
    gather = 1e6 * seconds_of_a_call(lambda: group.all_gather(best))
    if rank == 0:
        path.write_text(json.dumps({"sums": rows, "products": products, "gather_of_bests_us": gather}))
    group.close()


def product_and_sum(group: ProcessGroup, tokens: int, outputs: int, inputs: int) -> dict[str, Any]:
    """Microseconds of a product that ranks share: alone, with a sum in a kernel of its own, and with the sum in its last lines.

    The weights are never those of the call before, so that they come from memory.
    """
    from folovllm.kernels.skinny_linear import skinny_linear
    from folovllm.kernels.summed_linear import summed_linear

    inputs //= group.size
    weights = torch.randn(2**28 // (outputs * inputs), outputs, inputs, dtype=torch.bfloat16, device="cuda")
    x, residual = (torch.randn(tokens, n, dtype=torch.bfloat16, device="cuda") for n in (inputs, outputs))
    row: dict[str, Any] = {"tokens": tokens, "outputs": outputs, "inputs of a rank": inputs}
    ways = {
        "product_us": lambda weight: skinny_linear(x, weight),
        "two_kernels_us": lambda weight: group.all_reduce(skinny_linear(x, weight)),
        "one_kernel_us": lambda weight: summed_linear(x, weight, group.one_shot_buffers, residual),
    }
    if group.one_shot_buffers is None:
        del ways["one_kernel_us"]
    for name, way in ways.items():
        turn = cycle(weights)
        row[name] = 1e6 * seconds_of_a_call(lambda way=way, turn=turn: way(next(turn)))
    return row


def seconds_of_a_call(call: Callable[[], object]) -> float:
    """The median of ten replays of a graph of `CALLS` calls, by call."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    graph, times = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()
    for _ in range(10):
        torch.cuda.synchronize()
        start = time.perf_counter()
        graph.replay()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) / CALLS)
    del graph
    return sorted(times)[len(times) // 2]


def profile(path: Path, geometry: str) -> None:
    """One of several ranks: a profiler's view of decode steps with one sequence. Rank 0 writes JSON.

    A sum's kernels wait for the slowest rank, so their time holds that wait, too.
    """
    size = int(os.environ["WORLD_SIZE"])
    fields = {"device": "cuda", "use_tqdm": False, "milestone": "m6", "max_num_seqs": 1, "tensor_parallel_size": size}
    with tempfile.TemporaryDirectory() as folder, LLM(**random_model(geometry, Path(folder), fields)) as llm:
        engine, params = llm.engine, SamplingParams(temperature=0.0, max_tokens=4 * STEPS, ignore_eos=True)
        engine.add_request("one", list(range(128)), params)
        for _ in range(STEPS):
            engine.step()
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
            for _ in range(STEPS):
                engine.step()
            torch.cuda.synchronize()
        while engine.has_unfinished_requests():
            engine.step()
        kernels = {event.key: event.self_device_time_total / STEPS for event in seen.key_averages()}
    sums = {key: us for key, us in kernels.items() if "all_reduce" in key or "AllReduce" in key}
    gathers = {key: us for key, us in kernels.items() if "AllGather" in key}
    copies = {key: us for key, us in kernels.items() if key.startswith("Memcpy DtoD")}
    if os.environ["RANK"] == "0":
        shares = {"all kernels": sum(kernels.values()), "sums": sum(sums.values()), "gathers": sum(gathers.values())}
        record = {"geometry": geometry, "size": size, "us_a_step": shares | {"device copies": sum(copies.values())}}
        path.write_text(json.dumps(record | {"kernels": dict(sorted(kernels.items(), key=lambda item: -item[1])[:20])}))


def asked_of_ranks(size: int, what: str) -> dict[str, Any]:
    """The JSON that rank 0 wrote. `what` is "collectives" or a geometry."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "answer.json"
        on_ranks(size, "--as-rank", what, "--out", str(path))
        answer: dict[str, Any] = json.loads(path.read_text())
    return answer


# --- how does it scale -------------------------------------------------------------------------------------------------


def scaling(geometry: str, sizes: list[int], given: argparse.Namespace) -> None:
    """Latency and throughput of one geometry, an engine for every number of ranks."""
    with tempfile.TemporaryDirectory() as folder:
        model = random_model(geometry, Path(folder), {"device": given.device, "use_tqdm": False})
        engines = parse_contenders(",".join(f"m6:tensor_parallel_size={size}" for size in sizes), model)
        for bench in (
            partial(bench_latency, engines),
            partial(bench_throughput, engines, "nano-vllm", given.requests, given.repeats),
        ):
            result = bench().describe_here()
            result.save(given.out / f"{geometry}-{result.benchmark}.json")
            print(f"\n{geometry}")
            show(result)


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    """Rows with the machine, the versions and the command, on paper and on the screen."""
    print(f"\n{path.stem}", *rows, sep="\n")
    here = Result(path.stem, {}).describe_here()
    path.write_text(json.dumps({**asdict(here), "rows": rows}, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="1,2")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--geometries", default="qwen3-0.6b,qwen3-8b")
    parser.add_argument("--parts", default="check,sums,profile,scaling", help="which of these; all by default")
    parser.add_argument("--requests", type=int, help="of the throughput workload and of the check")
    parser.add_argument("--repeats", type=int, default=1, help="of the throughput workload")
    parser.add_argument("--out", type=Path, default=Path("tp-results"))
    parser.add_argument("--as-rank", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.as_rank:
        collectives(given.out) if given.as_rank == "collectives" else profile(given.out, given.as_rank)
        return
    given.out.mkdir(parents=True, exist_ok=True)
    sizes, parts = [int(size) for size in given.sizes.split(",")], given.parts.split(",")
    several = [size for size in sizes if size > 1]
    geometries = given.geometries.split(",") if given.geometries != "none" else []
    if "check" in parts:
        write(given.out / "check.json", check(sizes, given.device, min(given.requests or 16, 16), {}))
    if "sums" in parts and given.device == "cuda":
        write(given.out / "collectives.json", [asked_of_ranks(size, "collectives") for size in several])
    if "scaling" in parts:
        for geometry in geometries:
            scaling(geometry, sizes, given)
    if "profile" in parts and given.device == "cuda":
        write(given.out / "profile.json", [asked_of_ranks(size, name) for name in geometries for size in several])


if __name__ == "__main__":
    main()
