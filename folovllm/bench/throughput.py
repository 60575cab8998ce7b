"""`folovllm bench throughput`: a workload through one engine, or through several in one run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from folovllm.bench.contenders import Contender, used_settings
from folovllm.bench.host_time import StepTime, step_times
from folovllm.bench.report import Metric, Result, Run
from folovllm.bench.roofline import Rates, measure_rates, roofline_seconds
from folovllm.bench.workload import Workload, load_workload
from folovllm.build import make_engine
from folovllm.config import EngineConfig
from folovllm.engine.cpu_threads import use_threads
from folovllm.engine.llm_engine import LLMEngine
from folovllm.engine.setup import set_up
from folovllm.outputs import RequestOutput
from folovllm.sampling_params import SamplingParams

Answers = dict[str, list[int]]  # token ids by request

AGREEMENT = "tokens as the first's"
PER_CPU_SECOND = "output tokens a CPU second"  # what a busy machine does not disturb
ROOFLINE = "of the roofline"
WASTE = "KV memory wasted"
LONGEST_GAP = "longest wait between tokens"
REUSED = "prompt tokens found"
SAMPLE_EVERY = 16  # steps between two looks at the cache


@dataclass(slots=True)
class Observed:
    """What one pass of a workload through an engine showed."""

    seconds: float = 0.0
    cpu_seconds: float = 0.0  # of this process, all threads: what a busy machine does not disturb
    outputs: dict[str, RequestOutput] = field(default_factory=dict)  # of finished requests
    prompt_tokens: int = 0  # of all requests whose prefill was done in time
    output_tokens: int = 0  # generated in time, by unfinished requests too
    steps: int = 0
    batch: int = 0  # sum over the steps of how many ran
    waste: list[float] = field(default_factory=list)
    longest_gap: float = 0.0  # seconds of the longest step that gave a running request its next token
    reused: int = 0  # prompt tokens that were found in the cache
    partial: bool = False

    def count(self, output: RequestOutput) -> None:
        """Add one request's tokens."""
        self.output_tokens += output.metrics.num_generated_tokens
        if output.metrics.num_generated_tokens:
            self.prompt_tokens += output.metrics.num_prompt_tokens
            self.reused += output.num_cached_tokens


@dataclass(slots=True)
class OfEngine:
    """What was found out once for an engine, not in each pass."""

    start_up: float  # seconds: weights, cache, compiled kernels, recorded graphs
    bound: float  # the roofline's seconds
    steps: list[StepTime] = field(default_factory=list)

    def metrics(self) -> dict[str, Metric]:
        """All but the bound, which says something only beside a pass."""
        found = {"start-up": Metric.of([self.start_up], "s", False)}
        for step in self.steps:
            batch = f"a step, {step.num_seqs} sequence{'s' if step.num_seqs > 1 else ''}"
            found[f"Python {batch}"] = Metric.of([1e3 * step.host], "ms", False)
            found[f"waiting {batch}"] = Metric.of([1e3 * step.waiting], "ms", False)
        return found


def run_workload(engine: LLMEngine, workload: Workload, limit: float | None = None) -> Observed:
    """Serve the requests as they arrive; after `limit` seconds, abort the rest and count what was generated.

    Raises:
        ValueError: a request does not fit into the engine's context.
    """
    if workload.longest > engine.setup.max_model_len:
        raise ValueError(
            f"the workload's longest request has {workload.longest} tokens, and the context is "
            f"{engine.setup.max_model_len}: choose another workload or model, or raise max_model_len"
        )
    seen, queue, start = Observed(), list(reversed(list(enumerate(workload.requests)))), time.perf_counter()
    cpu_start = time.process_time()
    while queue or engine.has_unfinished_requests():
        now = time.perf_counter() - start
        if limit is not None and now > limit:
            seen.partial = True
            break
        while queue and queue[-1][1].arrival <= now:
            index, request = queue.pop()
            params = SamplingParams(
                temperature=workload.temperature, max_tokens=request.output_len, ignore_eos=True, seed=index
            )
            engine.add_request(str(index), request.prompt, params, stream=False)
        if not engine.has_unfinished_requests():
            time.sleep(min(0.01, queue[-1][1].arrival - now))
            continue
        _step(engine, seen)
    seen.seconds, seen.cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
    _count(engine, seen, len(workload.requests) - len(queue))
    return seen


def _step(engine: LLMEngine, seen: Observed) -> None:
    seen.outputs |= {output.request_id: output for output in engine.step()}
    if engine.last_stats is not None:
        seen.steps += 1
        seen.batch += engine.last_stats.running
        if engine.last_stats.num_decode_tokens:
            seen.longest_gap = max(seen.longest_gap, engine.last_stats.seconds)
        if seen.steps % SAMPLE_EVERY == 1 and (stats := engine.stats()).kv_bytes_reserved:
            seen.waste.append(stats.kv_waste)


def _count(engine: LLMEngine, seen: Observed, submitted: int) -> None:
    """Tokens of finished requests, and of those that are aborted here."""
    for index in range(submitted):
        output = seen.outputs.get(str(index)) or engine.abort_request(str(index))
        seen.count(output)


def metrics_of(passes: list[Observed], bound: float | None) -> dict[str, Metric]:
    """The figures of one or several passes; `bound` is the roofline's time for the whole workload."""

    def over(value: Callable[[Observed], float], unit: str = "", higher_is_better: bool = True) -> Metric:
        return Metric.of([value(one) for one in passes], unit, higher_is_better)

    metrics = {
        "output tokens": over(lambda p: p.output_tokens / p.seconds, "tok/s"),
        "prompt and output tokens": over(lambda p: (p.prompt_tokens + p.output_tokens) / p.seconds, "tok/s"),
        PER_CPU_SECOND: over(lambda p: p.output_tokens / max(p.cpu_seconds, 1e-9), "tok/s"),
        "time": over(lambda p: p.seconds, "s", False),
        "time on the CPU": over(lambda p: p.cpu_seconds, "s", False),
        "requests finished": over(lambda p: len(p.outputs)),
    }
    for name, quantile in (("TTFT median", 0.5), ("TTFT p99", 0.99), ("TPOT median", 0.5), ("TPOT p99", 0.99)):
        field_name = name[:4].lower()
        times = [[t for o in p.outputs.values() if (t := getattr(o.metrics, field_name)) is not None] for p in passes]
        if all(times):
            metrics[name] = Metric.of([1e3 * _quantile(t, quantile) for t in times], "ms", False)
    metrics[LONGEST_GAP] = over(lambda p: 1e3 * p.longest_gap, "ms", False)
    if any(p.reused for p in passes):
        metrics[REUSED] = over(lambda p: 100 * p.reused / max(1, p.prompt_tokens), "%")
    metrics["steps"] = over(lambda p: p.steps, "", False)
    metrics["sequences a step"] = over(lambda p: p.batch / max(1, p.steps))
    if all(p.waste for p in passes):
        metrics[WASTE] = over(lambda p: 100 * statistics.fmean(p.waste), "%", False)
    if bound is not None and not any(p.partial for p in passes):
        metrics[ROOFLINE] = over(lambda p: 100 * bound / p.seconds, "%")
    return metrics


def _quantile(values: list[float], q: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]


def bench_throughput(
    contenders: list[Contender],
    workload_name: str = "default",
    count: int | None = None,
    repeats: int = 1,
    limit: float | None = None,
    with_step_times: bool = False,
) -> Result:
    """Run the workload through each contender, one after the other: (name, fields of EngineConfig).

    Each engine serves a few other requests first (its warm-up); prefix caches are emptied before each pass. Greedy
    answers are compared with the first contender's. With `with_step_times`, what Python costs is measured afterwards
    (`folovllm.bench.host_time`).
    """
    configs = [(name, EngineConfig(**overrides)) for name, overrides in contenders]
    setup = set_up(configs[0][1])
    workload = load_workload(workload_name, setup.vocab_size, count)
    use_threads(setup)  # of this number the rates are
    rates = measure_rates(setup.device, setup.dtype)  # before an engine takes the memory
    result = Result("throughput", workload.describe())
    result.machine = {"copy_gb_per_s": rates.copy / 1e9, "matmul_tflop_per_s": rates.matmul / 1e12}
    first: Answers | None = None
    for name, config in configs:
        passes, more = _measure(config, workload, rates, repeats, limit, with_step_times)
        metrics = metrics_of(passes, more.bound) | more.metrics()
        answers = {i: output.outputs[0].token_ids for i, output in passes[-1].outputs.items()}
        if first is not None and workload.temperature == 0:
            metrics |= _agreement(first, answers)
        first = answers if first is None else first
        result.runs.append(Run(name, used_settings(config), metrics, any(p.partial for p in passes)))
    return result


def _measure(
    config: EngineConfig, workload: Workload, rates: Rates, repeats: int, limit: float | None, with_step_times: bool
) -> tuple[list[Observed], OfEngine]:
    """Passes of the workload through an engine that lives for them, and what holds for all of them."""
    start = time.perf_counter()
    engine = make_engine(config)
    try:
        found = OfEngine(time.perf_counter() - start, roofline_seconds(workload, engine.setup, rates))
        warm_up(engine, workload)
        passes = []
        for _ in range(repeats):
            empty_prefix_cache(engine)
            passes.append(run_workload(engine, workload, limit))
        if with_step_times:
            found.steps = step_times(engine)
        return passes, found
    finally:
        engine.close()
        torch.cuda.empty_cache()  # the next engine measures what is free


def warm_up(engine: LLMEngine, workload: Workload) -> None:
    """Serve four requests of other tokens: what is made on first use is made before the clock runs."""
    vocab_size = engine.setup.vocab_size
    for index, request in enumerate(workload.requests[:4]):
        other = [(token + 1) % vocab_size for token in request.prompt]
        params = SamplingParams(temperature=workload.temperature, max_tokens=4, ignore_eos=True)
        engine.add_request(f"warm-up {index}", other, params, stream=False)
    while engine.has_unfinished_requests():
        engine.step()


def empty_prefix_cache(engine: LLMEngine) -> None:
    """Start cold: a repeat must not find what the pass before left."""
    if engine.setup.config.enable_prefix_caching:
        engine.reset_prefix_cache()


def _agreement(first: Answers, other: Answers) -> dict[str, Metric]:
    """Share of greedy tokens, up to the first that differs, over the requests that both finished; none if there are none."""
    same = total = 0
    for request_id in first.keys() & other.keys():
        pairs = list(zip(first[request_id], other[request_id], strict=True))
        total += len(pairs)
        same += next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
    return {AGREEMENT: Metric.of([100 * same / total], "%")} if total else {}
