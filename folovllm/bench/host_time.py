"""What Python costs: the part of a decode step in which the host works and does not wait for the device.

With overlap the two do not add up to anything a user feels: as long as the host waits at all, the device has work, and
Python is free. Without overlap, the device has nothing to do while the host works.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from folovllm.bench.report import Metric
from folovllm.engine.llm_engine import LLMEngine
from folovllm.engine.metrics import StepLog
from folovllm.executor.abstract import Pending
from folovllm.sampling_params import SamplingParams
from folovllm.worker.graph_runner import GraphRunner

BATCHES = (1, 256)
PROMPT, STEPS, SETTLE = 16, 32, 4  # tokens of a prompt; steps that count, and those before them that do not
FEWEST = 3  # steps that must count
MOST_SECONDS = 2.0  # then fewer steps have to do


class WaitClock:
    """Adds up the seconds that the host waits for the device: those inside the functions that it wraps."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def around(self, work: Callable[..., Any]) -> Callable[..., Any]:
        """Return `work` with its whole time on the clock."""

        def on_the_clock(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return work(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - start

        return on_the_clock

    def around_wait(self, start: Callable[..., Pending]) -> Callable[..., Pending]:
        """Return `start`, which starts a step, with the later wait for that step on the clock."""
        return lambda *args, **kwargs: SimpleNamespace(wait=self.around(start(*args, **kwargs).wait))

    def then_synchronize(self, launch: Callable[..., Any]) -> Callable[..., Any]:
        """Return `launch`, which queues work, followed by a wait, on the clock, for all that is queued."""

        def launch_and_wait(*args: Any, **kwargs: Any) -> Any:
            result = launch(*args, **kwargs)
            self.around(torch.cuda.synchronize)()
            return result

        return launch_and_wait


@contextmanager
def watched(engine: LLMEngine, clock: WaitClock) -> Iterator[None]:
    """Run the clock, until the end of the block, whenever the engine waits for its device."""
    with ExitStack() as stack:
        for target, name, wrap in _waits(engine, clock):
            stack.enter_context(mock.patch.object(target, name, wrap(getattr(target, name))))
        yield


def _waits(engine: LLMEngine, clock: WaitClock) -> list[tuple[Any, str, Callable[..., Any]]]:
    """List where the host waits: (object, method, wrapper). A CPU's own work for the model counts as waiting."""
    worker: Any = getattr(engine.executor, "_worker", None)
    if worker is None:  # elsewhere
        return [(engine.executor, "submit", clock.around_wait)]
    runner, packed = worker.runner, isinstance(worker.runner, GraphRunner)
    if engine.setup.device.type == "cpu":
        model = runner.model
        work = [(model, "forward"), (model, "compute_logits")]
        work += (
            [(runner._step_sampler, "one_pass"), (runner._row_sampler, "sample")]
            if packed
            else [(runner._sampling_rows._sampler, "sample")]
        )
        return [(target, name, clock.around) for target, name in work if hasattr(target, name)]
    if packed:
        return [(runner, "execute_model", clock.around_wait)]
    return [(runner._sampling_rows._sampler, "sample", clock.then_synchronize)]


@dataclass(slots=True, frozen=True)
class StepTime:
    """Median seconds of a decode step: how long the host worked, and how long it waited."""

    num_seqs: int
    host: float
    waiting: float

    def metrics(self) -> dict[str, Metric]:
        """The same for a report."""
        batch = f"a step, {self.num_seqs} sequence{'s' if self.num_seqs > 1 else ''}"
        return {
            f"Python {batch}": Metric.of([1e3 * self.host], "ms", False),
            f"waiting {batch}": Metric.of([1e3 * self.waiting], "ms", False),
        }


def step_times(engine: LLMEngine, batches: tuple[int, ...] = BATCHES) -> list[StepTime]:
    """Time decode steps of as many sequences as `batches` says, or as the engine serves at once; contexts are short.

    A size is left out where accepted draft tokens reach the end of the context in fewer than `FEWEST` steps.

    The engine must be idle, and is so afterwards.
    """
    sizes = dict.fromkeys(min(size, _room(engine)) for size in batches)
    return [time for size in sizes if (time := _step_time(engine, size)) is not None]


def _room(engine: LLMEngine) -> int:
    """Return how many sequences can decode together without a preemption."""
    setup, num_blocks, speculation = engine.setup, engine.executor.num_kv_blocks, engine.setup.config.speculative_config
    if not num_blocks:  # caches that grow
        return setup.max_num_seqs
    first_steps = -(-setup.max_num_seqs * PROMPT // setup.max_num_batched_tokens)  # until all prompts are computed
    most = 1 + (speculation.num_speculative_tokens if speculation else 0)  # tokens of a sequence in a step
    tokens = min(setup.max_model_len, PROMPT + most * (first_steps + SETTLE + STEPS + 2))
    return max(1, min(setup.max_num_seqs, num_blocks // -(-tokens // setup.block_size)))


def _step_time(engine: LLMEngine, num_seqs: int) -> StepTime | None:
    clock, times = WaitClock(), list[tuple[float, float]]()
    params = SamplingParams(temperature=0.6, max_tokens=None, ignore_eos=True)
    names = [f"step time {i}" for i in range(num_seqs)]
    for i, name in enumerate(names):
        prompt = [(31 * i + j) % engine.setup.vocab_size for j in range(PROMPT)]
        engine.add_request(name, prompt, params, stream=False)
    with watched(engine, clock):
        _until_all_decode(engine, num_seqs)
        end = time.perf_counter() + MOST_SECONDS
        while len(times) < STEPS and (len(times) < FEWEST or time.perf_counter() < end):
            start, clock.seconds = time.perf_counter(), 0.0
            engine.step()
            if engine.get_num_unfinished_requests() < num_seqs:
                break
            times.append((time.perf_counter() - start - clock.seconds, clock.seconds))
        engine.abort_request(names)
        engine.step()  # takes in what is in flight
    if len(times) < FEWEST:
        return None
    host, waiting = (statistics.median(column) for column in zip(*times, strict=True))
    return StepTime(num_seqs, host, waiting)


def _until_all_decode(engine: LLMEngine, num_seqs: int) -> None:
    decodes, log = 0, StepLog()
    engine.subscribe(log)
    while decodes < SETTLE and engine.get_num_unfinished_requests() == num_seqs:
        engine.step()
        decodes += sum(step.running == num_seqs and not step.num_prefill_tokens for step in log.take())
    engine.unsubscribe(log)
