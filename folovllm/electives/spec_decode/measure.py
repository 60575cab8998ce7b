"""Times steps with and without draft tokens on this machine, when an engine starts."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from folovllm.electives.spec_decode.choose import Curve, StepCost
from folovllm.electives.spec_decode.proposer import Proposer, RowState
from folovllm.electives.spec_decode.verify import max_samples
from folovllm.engine.setup import EngineSetup
from folovllm.executor.abstract import Executor
from folovllm.step.schedule import SamplingSpec, ScheduledSequence, SchedulerOutput, TokenIds

CONTEXT = 128  # tokens that each sequence has already, if the context and the cache allow it
ROUNDS = 3
TIME_LIMIT = 0.4  # seconds for the curve: a slow machine gets fewer points of it
GPU_IDLE = 1.5e-4  # seconds that a GPU waits after a step with drafts, until the host has scheduled the next one
MAX_TOKENS = 512  # of a timed step: the curve goes straight on from there


def measure_steps(executor: Executor, setup: EngineSetup, most: int) -> StepCost:
    """Return the measured cost of steps of 1, 2, 4, ... tokens, of few sequences with up to `most` draft tokens each.

    The sequences are made up and share their blocks; no request uses what they leave in the cache. The host waits for each timed
    step. The curve is without that wait, which is measured with steps of one token.
    """
    most = min(most, setup.max_model_len - 2)
    widest = min(
        setup.max_num_batched_tokens, setup.max_num_seqs * (most + 1), max_samples(setup.max_num_seqs), MAX_TOKENS
    )
    widths = [1 << i for i in range(widest.bit_length())]
    steps = [[most + 1] * (n // (most + 1)) + [n % (most + 1)] * (n % (most + 1) > 0) for n in widths]
    steps = [lengths for lengths in steps if len(lengths) <= setup.max_num_seqs]
    timer = Timer(executor, setup, most)
    seconds = timer.curve(steps)
    wait = max(0.0, seconds[0] - timer.overlapped())
    idle = 0.0 if setup.device.type == "cpu" else GPU_IDLE
    return StepCost(Curve(widths[: len(seconds)], [each - wait for each in seconds]), wait + idle)


def measure_drafting(executor: Executor, setup: EngineSetup, proposer: Proposer, most: int, cost: StepCost) -> None:
    """Set the proposer's seconds in `cost`, from the times of a step with one draft token and of one with `most`.

    A step may begin before the host knows its draft tokens. So both are timed together, and the step's own cost is subtracted.
    """
    most = max(1, min(most, setup.max_model_len - 2))
    time_of = Timer(executor, setup, most)
    one, every = (max(0.0, time_of.drafting(proposer, k) - cost.of_verifying(1 + k)) for k in (1, most))
    cost.per_draft_token = max(0.0, every - one) / max(1, most - 1)
    cost.first_draft_token = one - cost.per_draft_token


def clock_for(setup: EngineSetup) -> Callable[[], float]:
    """Return the clock for steps. On a CPU with one process it counts CPU time, so that other programs do not disturb it."""
    is_here = setup.device.type == "cpu" and setup.config.tensor_parallel_size == 1
    return time.process_time if is_here else time.perf_counter


class Timer:
    """Times made-up steps."""

    def __init__(self, executor: Executor, setup: EngineSetup, most: int) -> None:
        self._executor = executor
        self._clock, self._vocab_size = clock_for(setup), setup.vocab_size
        room = min(setup.max_model_len - 1, executor.num_kv_blocks * setup.block_size)
        self._start = max(0, min(CONTEXT, room - most - 1))
        self._blocks = tuple(range(-(-(self._start + most + 1) // setup.block_size)))

    def curve(self, steps: list[list[int]]) -> list[float]:
        """Return the seconds of `steps`, each a list of its sequences' tokens: of the first two, and of more within `TIME_LIMIT`."""
        end = self._clock() + TIME_LIMIT
        found: list[float] = []
        for lengths in steps:
            if len(found) >= 2 and self._clock() > end:
                break
            step = self._admitted(lengths)
            seconds = self._fastest(lambda step=step: self._executor.execute_model(step))  # type: ignore[misc]
            found.append(max([seconds, *found[-1:]]))  # more tokens are never cheaper
        return found

    def overlapped(self) -> float:
        """Return the seconds of a step of one token when each is submitted before the host has the token of the one before."""
        step = self._admitted([1])

        def run() -> None:
            before = self._executor.submit(step)
            for _ in range(ROUNDS):
                after = self._executor.submit(step)
                before.wait()
                before = after
            before.wait()

        return self._fastest(run) / (1 + ROUNDS)

    def drafting(self, proposer: Proposer, k: int) -> float:
        """Return the seconds to draft `k` tokens and verify them."""
        text = np.arange(self._start + 1, dtype=np.int32) % self._vocab_size
        state = RowState(-1, text, len(text), SamplingSpec(temperature=0))
        self._admitted([1])
        proposer.admit(state)

        def run() -> None:
            tokens = np.array([0, *proposer.propose_all([state], [k])[0]], np.int32)
            scheduled = self._scheduled(0, tokens, None)
            self._executor.execute_model(SchedulerOutput((scheduled,)))

        seconds = self._fastest(run)
        proposer.finish(state.seq_id)
        return seconds

    def _fastest(self, run: Callable[[], object]) -> float:
        """Return the seconds of the fastest of `ROUNDS` rounds. The round before them is not timed, since it allocates memory."""
        times = [self._clock()]
        for _ in range(1 + ROUNDS):
            run()
            times.append(self._clock())
        return float(min(np.diff(times)[1:]))

    def _admitted(self, lengths: list[int]) -> SchedulerOutput:
        """Return a step of sequences with so many new tokens each, once the executor knows them."""
        spec, token = SamplingSpec(temperature=0), np.zeros(1, np.int32)
        new = tuple(self._scheduled(row, token, spec) for row in range(len(lengths)))
        self._executor.execute_model(SchedulerOutput(new))
        return SchedulerOutput(
            tuple(self._scheduled(row, np.zeros(n, np.int32), None) for row, n in enumerate(lengths))
        )

    def _scheduled(self, row: int, tokens: TokenIds, sampling: SamplingSpec | None) -> ScheduledSequence:
        """Return a sequence that samples behind each of its new tokens. `sampling`: of one that the executor does not know yet."""
        blocks, first = ((), len(self._blocks)) if sampling is None else (self._blocks, 0)
        end = self._start + len(tokens)
        return ScheduledSequence(-1 - row, row, self._start, end, tokens, blocks, first, len(tokens), sampling)
