"""Tensor parallelism measured: is it right, how fast is a sum, how do throughput and latency scale.

    python tools/bench_tp.py --sizes 1,2 --out docs/data/tp          # on a machine with two GPUs
    python tools/bench_tp.py --sizes 1,2 --device cpu --geometries none --requests 4   # a rehearsal

It writes one JSON file for each part, and prints tables. Weights are random (the check uses the embedded model), so
nothing is downloaded. `--geometries none` leaves the long part out.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from folovllm import LLM, SamplingParams
from folovllm.bench.contenders import random_model
from folovllm.bench.latency import bench_latency
from folovllm.bench.report import show
from folovllm.bench.throughput import bench_throughput

SHAPES = ((1, 1024), (256, 1024), (1, 4096), (256, 4096), (4096, 4096))  # [tokens, H]: decode alone, decode, prefill
CALLS = 72  # all-reduces of a step of 36 layers


def check(size: int, device: str, count: int) -> dict[str, Any]:
    """Tokens of `size` ranks and of one, with graphs and overlap, float32: the share that agrees before the first that does not."""
    requests = [
        SamplingParams(max_tokens=64, ignore_eos=True, seed=i, temperature=0.8 * (i % 2), top_p=(1.0, 0.9)[i % 4 == 3])
        for i in range(count)
    ]
    prompts = [[(7 * i + j * (i + 1)) % 4000 for j in range(5 + 11 * i)] for i in range(count)]
    answers = []
    for ranks in (1, size):
        with LLM(device=device, dtype="float32", tensor_parallel_size=ranks, max_num_seqs=16, use_tqdm=False) as llm:
            outputs = llm.generate(prompts, requests, use_tqdm=False)
        answers.append([output.outputs[0].token_ids for output in outputs])
    same = total = 0
    for mine, reference in zip(*answers, strict=True):
        same += next((i for i, pair in enumerate(zip(mine, reference, strict=True)) if pair[0] != pair[1]), len(mine))
        total += len(mine)
    return {"size": size, "tokens": total, "same": same}


def collectives() -> None:
    """Under torchrun: microseconds of one sum in a recorded graph, ours and NCCL's. Rank 0 prints JSON."""
    import torch.distributed as dist

    from folovllm.distributed.group import ProcessGroup

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    group = ProcessGroup(rank, size, torch.device("cuda", rank))
    rows = []
    for shape in SHAPES:
        x = torch.zeros(shape, dtype=torch.bfloat16, device="cuda")
        row: dict[str, Any] = {"size": size, "shape": shape, "one_shot": group.takes_short_way(x)}
        for name, call in (("ours", lambda x=x: group.all_reduce(x)), ("nccl", lambda x=x: dist.all_reduce(x))):
            row[f"{name}_us"] = 1e6 * seconds_of_a_call(call)
        rows.append(row)
    if rank == 0:
        print("\n" + json.dumps(rows))
    group.close()


def seconds_of_a_call(call: Any) -> float:
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


def scaling(geometry: str, sizes: list[int], device: str, requests: int | None, out: Path) -> None:
    """Throughput and latency of one geometry for every number of ranks."""
    with tempfile.TemporaryDirectory() as folder:
        model = random_model(geometry, Path(folder), {"device": device, "use_tqdm": False, "milestone": "m6"})
        contenders = [(f"{size} ranks", {**model, "tensor_parallel_size": size}) for size in sizes]
        for name, result in (
            ("latency", bench_latency(contenders)),
            ("throughput", bench_throughput(contenders, "nano-vllm", requests)),
        ):
            for run in result.runs:
                run.metrics.pop("of the roofline", None)  # which is that of one card
            print(f"\n{geometry}")
            measured = result.machine
            result.describe_here().machine |= measured
            show(result)
            result.save(out / f"{geometry}-{name}.json")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="1,2")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--geometries", default="qwen3-0.6b,qwen3-8b")
    parser.add_argument("--requests", type=int)
    parser.add_argument("--out", type=Path, default=Path("tp-results"))
    parser.add_argument("--collectives", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.collectives:
        collectives()
        return
    given.out.mkdir(parents=True, exist_ok=True)
    sizes = [int(size) for size in given.sizes.split(",")]
    checks = [check(size, given.device, given.requests or 16) for size in sizes if size > 1]
    print(*checks, sep="\n")
    (given.out / "check.json").write_text(json.dumps(checks, indent=1))
    if given.device == "cuda":
        rows = []
        for size in (size for size in sizes if size > 1):
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}"]
            done = subprocess.run([*command, __file__, "--collectives"], stdout=subprocess.PIPE, text=True, check=True)
            rows += json.loads(done.stdout.strip().splitlines()[-1])
        print(*rows, sep="\n")
        (given.out / "collectives.json").write_text(json.dumps(rows, indent=1))
    for geometry in given.geometries.split(",") if given.geometries != "none" else []:
        scaling(geometry, sizes, given.device, given.requests, given.out)


if __name__ == "__main__":
    main()
