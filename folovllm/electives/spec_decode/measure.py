"""Times steps with and without draft tokens on this machine, when an engine starts."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import numpy as np

from folovllm.electives.spec_decode.choose import Curve, StepCost
from folovllm.electives.spec_decode.proposer import Proposer, RowState
from folovllm.electives.spec_decode.verify import max_samples
from folovllm.engine.setup import EngineSetup
from folovllm.executor.abstract import Executor
from folovllm.step.schedule import SamplingSpec, ScheduledSequence, SchedulerOutput

CONTEXT = 128  # tokens that each sequence has already, if the context and the cache allow it
ROUNDS = 3
TIME_LIMIT = 0.4  # seconds for the curve: a slow machine gets fewer points of it
GPU_IDLE = 1.5e-4  # seconds that a GPU waits after a step with drafts, until the host has scheduled the next one
MAX_TOKENS = 512  # of a timed step: the curve goes straight on from there
GREEDY = SamplingSpec(temperature=0)


def measure_steps(executor: Executor, setup: EngineSetup, most: int) -> StepCost:
    """Return the measured cost of steps of 1, 2, 4, ... tokens, of few sequences with up to `most` draft tokens each.

    The host waits for each timed step. The curve is without that wait, which is measured with steps of one token.
    """
    timer = Timer(executor, setup, most)
    longest, most_seqs = timer.most + 1, setup.max_num_seqs
    widest = min(setup.max_num_batched_tokens, most_seqs * longest, max_samples(most_seqs), MAX_TOKENS)
    widths, seconds, end = [1 << i for i in range(widest.bit_length())], list[float](), timer.clock() + TIME_LIMIT
    for n in widths:
        lengths = [longest] * (n // longest) + [n % longest] * (n % longest > 0)
        if len(lengths) > most_seqs or (len(seconds) >= 2 and timer.clock() > end):
            break
        step = timer.step(lengths)
        seconds.append(max([timer.fastest(partial(executor.execute_model, step)), *seconds[-1:]]))  # never cheaper
    wait = max(0.0, seconds[0] - timer.fastest(partial(timer.overlap, timer.step([1]))) / ROUNDS)
    idle = 0.0 if setup.device.type == "cpu" else GPU_IDLE
    return StepCost(Curve(widths[: len(seconds)], [each - wait for each in seconds]), wait + idle)


def measure_drafting(executor: Executor, setup: EngineSetup, proposer: Proposer, most: int, cost: StepCost) -> None:
    """Set the proposer's seconds in `cost`, from the times of a step with one draft token and of one with `most`.

    A step may begin before the host knows its draft tokens. So both are timed together, and the step's own cost is subtracted.
    """
    timer = Timer(executor, setup, most)
    ks = 1, max(1, timer.most)
    one, every = (max(0.0, timer.drafting(proposer, k) - cost.of_verifying(1 + k)) for k in ks)
    cost.per_draft_token = max(0.0, every - one) / max(1, timer.most - 1)
    cost.first_draft_token = one - cost.per_draft_token


def clock_for(setup: EngineSetup) -> Callable[[], float]:
    """Return the clock for steps. On a CPU with one process it counts CPU time, so that other programs do not disturb it."""
    is_here = setup.device.type == "cpu" and setup.config.tensor_parallel_size == 1
    return time.process_time if is_here else time.perf_counter


class Timer:
    """Times made-up steps. Their sequences share their blocks, and no request uses what they leave in the cache."""

    def __init__(self, executor: Executor, setup: EngineSetup, most: int) -> None:
        """`most`: draft tokens of a sequence. `self.most` is less if the context has no room for so many."""
        self.clock, self.most = clock_for(setup), min(most, setup.max_model_len - 2)
        self._executor, self._vocab_size = executor, setup.vocab_size
        room = min(setup.max_model_len - 1, executor.num_kv_blocks * setup.block_size)
        self._start = max(0, min(CONTEXT, room - self.most - 1))
        self._blocks = tuple(range(-(-(self._start + self.most + 1) // setup.block_size)))

    def fastest(self, work: Callable[[], object]) -> float:
        """Return the seconds of the fastest of `ROUNDS` rounds of `work`, after one that is not timed, since it allocates memory."""
        found = []
        for _ in range(1 + ROUNDS):
            start = self.clock()
            work()
            found.append(self.clock() - start)
        return min(found[1:])

    def step(self, lengths: list[int]) -> SchedulerOutput:
        """Return a step that computes so many tokens of each sequence and samples after each; the devices know the rows."""
        new = [self._scheduled(row, np.zeros(1, np.int32), is_new=True) for row in range(len(lengths))]
        self._executor.execute_model(SchedulerOutput(tuple(new)))
        return SchedulerOutput(tuple(self._scheduled(row, np.zeros(n, np.int32)) for row, n in enumerate(lengths)))

    def overlap(self, step: SchedulerOutput) -> None:
        """Run a step `ROUNDS` times, and submit each before the host has the tokens of the one before."""
        before = self._executor.submit(step)
        for _ in range(ROUNDS - 1):
            after = self._executor.submit(step)
            before.wait()
            before = after
        before.wait()

    def drafting(self, proposer: Proposer, k: int) -> float:
        """Return the seconds to draft `k` tokens and verify them."""
        text = np.arange(self._start + 1, dtype=np.int32) % self._vocab_size
        state = RowState(-1, text, len(text), GREEDY)

        def draft_and_verify() -> None:
            tokens = np.array([0, *proposer.propose_all([state], [k])[0]], np.int32)
            self._executor.execute_model(SchedulerOutput((self._scheduled(0, tokens),)))

        self.step([1])
        seconds = self.fastest(draft_and_verify)
        proposer.finish(state.seq_id)
        return seconds

    def _scheduled(self, row: int, tokens: np.ndarray, is_new: bool = False) -> ScheduledSequence:
        """Return a sequence with these new tokens, behind those that it has."""
        blocks, first = (self._blocks, 0) if is_new else ((), len(self._blocks))
        n, spec = len(tokens), GREEDY if is_new else None
        return ScheduledSequence(-1 - row, row, self._start, self._start + n, tokens, blocks, first, n, spec)
