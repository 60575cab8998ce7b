"""Serve requests and look on: what every benchmark does with an engine."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import fmean

from folovllm.apps.bench.workload import Workload
from folovllm.config import EngineConfig
from folovllm.engine.llm_engine import LLMEngine, make_engine
from folovllm.engine.metrics import EngineStats, StepLog
from folovllm.outputs import RequestOutput
from folovllm.sampling_params import SamplingParams

LOOK_EVERY = 16  # steps between two looks at the cache


@contextmanager
def running(config: EngineConfig) -> Iterator[LLMEngine]:
    """Make an engine, and close it at the end of the block: the next engine measures what memory is free."""
    engine = make_engine(config)
    try:
        yield engine
    finally:
        engine.close()


def exactly(count: int, temperature: float = 0.0, seed: int | None = None) -> SamplingParams:
    """Ask for `count` tokens, whatever the model says."""
    return SamplingParams(temperature=temperature, max_tokens=count, ignore_eos=True, seed=seed)


def finish(engine: LLMEngine) -> None:
    """Step until nobody is waiting any more."""
    while engine.has_unfinished_requests():
        engine.step()


def warm_up(engine: LLMEngine, workload: Workload) -> None:
    """Serve four requests of other tokens: what is made on first use is made before the clock runs."""
    for index, request in enumerate(workload.for_vocabulary(engine.setup.vocab_size, 1).requests[:4]):
        engine.add_request(f"warm-up {index}", request.prompt, exactly(4, workload.temperature), stream=False)
    finish(engine)


@dataclass(slots=True)
class Observed:
    """What one pass of a workload through an engine showed."""

    milestone: str | None
    block_size: int
    kv_bytes: int  # of the whole cache
    seconds: float = 0.0
    cpu_seconds: float = 0.0  # of this process, all threads: what a busy machine does not disturb
    outputs: dict[str, RequestOutput] = field(default_factory=dict)  # of finished requests
    prompt_tokens: int = 0  # of all requests whose prefill was done in time
    output_tokens: int = 0  # generated in time, by unfinished requests too
    steps: int = 0
    batch: int = 0  # sum over the steps of how many ran
    looks: list[EngineStats] = field(default_factory=list)  # at the cache, while a part of it was held
    longest_gap: float = 0.0  # seconds of the longest step that gave a running request its next token
    reused: int = 0  # prompt tokens that were found in the cache
    preemptions: int = 0
    partial: bool = False

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens a second, prefill included."""
        return self.output_tokens / self.seconds

    @property
    def mean_running(self) -> float:
        """Sequences in flight, the mean over the looks."""
        return fmean(stats.running for stats in self.looks)

    @property
    def mean_waste(self) -> float:
        """Share of the reserved bytes that hold no token, the mean over the looks."""
        return fmean(stats.kv_waste for stats in self.looks)


def run_workload(
    engine: LLMEngine, workload: Workload, limit: float | None = None, look_every: int = LOOK_EVERY
) -> Observed:
    """Serve the requests, all there at the start; after `limit` seconds, abort the rest and count what was generated.

    Raises:
        ValueError: a request does not fit into the engine's context.
    """
    if workload.longest > engine.setup.max_model_len:
        raise ValueError(
            f"the workload's longest request has {workload.longest} tokens, and the context is "
            f"{engine.setup.max_model_len}: choose another workload or model, or raise max_model_len"
        )
    before = engine.stats()
    seen = Observed(engine.setup.config.milestone, engine.setup.block_size, before.kv_bytes_total)
    engine.subscribe(log := StepLog())
    start, cpu_start = time.perf_counter(), time.process_time()
    for index, request in enumerate(workload.requests):
        params = exactly(request.output_len, workload.temperature, seed=index)
        engine.add_request(str(index), request.prompt, params, stream=False)
    while engine.has_unfinished_requests() and not seen.partial:
        seen.outputs |= {output.request_id: output for output in engine.step()}
        for step in log.take():
            if seen.steps % look_every == 0 and (stats := engine.stats()).kv_bytes_reserved:
                seen.looks.append(stats)
            seen.steps += 1
            seen.batch += step.running
            seen.longest_gap = max(seen.longest_gap, step.seconds if step.num_decode_tokens else 0)
        is_late = limit is not None and time.perf_counter() - start > limit
        seen.partial = is_late and engine.has_unfinished_requests()
    seen.seconds, seen.cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
    seen.preemptions = engine.stats().preemptions - before.preemptions
    engine.unsubscribe(log)
    for index in range(len(workload.requests)):
        output = seen.outputs.get(str(index)) or engine.abort_request(str(index))
        seen.output_tokens += output.metrics.num_generated_tokens
        if output.metrics.num_generated_tokens:
            seen.prompt_tokens += output.metrics.num_prompt_tokens
            seen.reused += output.num_cached_tokens
    return seen
