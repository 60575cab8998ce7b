"""`folovllm bench latency`: one request alone; what a single user feels."""

from __future__ import annotations

from folovllm.bench.contenders import Contender
from folovllm.bench.report import Result
from folovllm.bench.throughput import bench_throughput


def bench_latency(contenders: list[Contender], repeats: int = 3, limit: float | None = None) -> Result:
    """A prompt of 128 tokens and an answer of 256, batch 1; times of the median repeat."""
    result = bench_throughput(contenders, "latency", repeats=repeats, limit=limit, with_step_times=True)
    result.benchmark = "latency"
    for run in result.runs:
        for name in (
            "requests finished",
            "steps",
            "sequences a step",
            "TTFT p99",
            "TPOT p99",
            "prompt and output tokens",
        ):
            run.metrics.pop(name, None)
    return result
