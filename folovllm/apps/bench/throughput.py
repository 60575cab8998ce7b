"""`folovllm bench throughput` and `latency`: a workload through one engine, or through several in one run."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import fmean

from folovllm.apps.bench.contenders import Contender, used_settings
from folovllm.apps.bench.report import Metric, Result, Run, latencies
from folovllm.apps.bench.roofline import measure_rates, roofline_seconds
from folovllm.apps.bench.serve import LOOK_EVERY, Observed, run_workload, running, warm_up
from folovllm.apps.bench.workload import Workload, load_workload
from folovllm.config import EngineConfig
from folovllm.engine.cpu_threads import use_threads
from folovllm.engine.setup import set_up

Answers = dict[str, list[int]]  # token ids by request

AGREEMENT = "tokens as the first's"
PER_CPU_SECOND = "output tokens a CPU second"  # what a busy machine does not disturb
ROOFLINE = "of the roofline"
WASTE = "KV memory wasted"
LONGEST_GAP = "longest wait between tokens"
REUSED = "prompt tokens found"


def metrics_of(passes: list[Observed], bound: float | None = None) -> dict[str, Metric]:
    """The figures of one or several passes; `bound` is the roofline's time for the whole workload."""

    def over(value: Callable[[Observed], float], unit: str = "", higher_is_better: bool = True) -> Metric:
        return Metric.of([value(one) for one in passes], unit, higher_is_better)

    metrics = {
        "output tokens": over(lambda p: p.tokens_per_second, "tok/s"),
        "prompt and output tokens": over(lambda p: (p.prompt_tokens + p.output_tokens) / p.seconds, "tok/s"),
        PER_CPU_SECOND: over(lambda p: p.output_tokens / max(p.cpu_seconds, 1e-9), "tok/s"),
        "time": over(lambda p: p.seconds, "s", False),
        "time on the CPU": over(lambda p: p.cpu_seconds, "s", False),
        "requests finished": over(lambda p: len(p.outputs)),
    }
    for name in ("TTFT", "TPOT"):
        times = [[getattr(o.metrics, name.lower()) for o in p.outputs.values()] for p in passes]
        metrics |= latencies(name, [[t for t in one if t is not None] for one in times])
    metrics[LONGEST_GAP] = over(lambda p: 1e3 * p.longest_gap, "ms", False)
    if any(p.reused for p in passes):
        metrics[REUSED] = over(lambda p: 100 * p.reused / max(1, p.prompt_tokens), "%")
    metrics["steps"] = over(lambda p: p.steps, "", False)
    metrics["sequences a step"] = over(lambda p: p.batch / max(1, p.steps))
    if all(p.looks for p in passes):
        metrics[WASTE] = over(lambda p: 100 * p.mean_waste, "%", False)
    if bound is not None and not any(p.partial for p in passes):
        metrics[ROOFLINE] = over(lambda p: 100 * bound / p.seconds, "%")
    return metrics


def in_flight(passes: list[Observed]) -> dict[str, Metric]:
    """What passes that looked at each step saw of the cache."""
    looks = [stats for seen in passes for stats in seen.looks]
    return {
        "sequences in flight, mean": Metric.of([seen.mean_running for seen in passes]),
        "sequences in flight, most": Metric.of([max(stats.running for stats in looks)]),
        "of the cache filled": Metric.of([100 * fmean(s.kv_bytes_used / s.kv_bytes_total for s in looks)], "%"),
        "preemptions": Metric.of([seen.preemptions for seen in passes], higher_is_better=False),
    }


def bench_throughput(
    contenders: list[Contender], workload: str | Workload = "default", count: int | None = None, repeats: int = 1,
    limit: float | None = None, benchmark: str = "throughput", look_every: int = LOOK_EVERY,
) -> Result:  # fmt: skip
    """Run the workload through each contender, one after the other: (name, fields of EngineConfig).

    Each engine serves a few other requests first (its warm-up); prefix caches are emptied before each pass. Greedy
    answers are compared with the first contender's.
    """
    configs = [(name, EngineConfig(**overrides)) for name, overrides in contenders]
    setup = set_up(configs[0][1])
    workload = load_workload(workload, count) if isinstance(workload, str) else workload
    workload = workload.for_vocabulary(setup.vocab_size)
    use_threads(setup)  # the rates are of this number of threads
    rates = measure_rates(setup.device, setup.dtype)  # before an engine takes the memory
    result = Result(benchmark, workload.describe())
    result.machine = {"copy_gb_per_s": rates.copy / 1e9, "matmul_tflop_per_s": rates.matmul / 1e12}
    first: Answers = {}
    for name, config in configs:
        start, passes = time.perf_counter(), []
        with running(config) as engine:
            start_up = time.perf_counter() - start  # weights, cache, compiled kernels, captured graphs
            warm_up(engine, workload)
            for _ in range(repeats):
                if engine.setup.config.enable_prefix_caching:
                    engine.reset_prefix_cache()
                passes.append(run_workload(engine, workload, limit, look_every))
            metrics = metrics_of(passes, roofline_seconds(workload, engine.setup, rates))
        metrics |= in_flight(passes) if look_every == 1 else {}
        metrics["start-up"] = Metric.of([start_up], "s", False)
        answers = {i: output.outputs[0].token_ids for i, output in passes[-1].outputs.items()}
        if workload.temperature == 0 and result.runs:
            metrics |= _agreement(first, answers)
        first = first if result.runs else answers
        result.runs.append(Run(name, used_settings(config), metrics, any(p.partial for p in passes)))
    return result


def _agreement(first: Answers, other: Answers) -> dict[str, Metric]:
    """Compare greedy tokens up to the first that differs, over the requests that both finished, if there are any."""
    same = total = 0
    for request_id in first.keys() & other.keys():
        pairs = list(zip(first[request_id], other[request_id], strict=True))
        total += len(pairs)
        same += next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
    return {AGREEMENT: Metric.of([100 * same / total], "%")} if total else {}
