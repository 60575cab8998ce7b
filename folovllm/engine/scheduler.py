"""Who is served in the next step, and by how many tokens."""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Protocol

from folovllm.cache.manager import KVCacheManager
from folovllm.engine.stop import check_stop_conditions
from folovllm.request import Sequence, SequenceStatus


@dataclass(slots=True)
class ScheduledSequence:
    """A sequence's share of a step: its tokens `start` to `start + num_new_tokens`."""

    seq: Sequence
    start: int
    num_new_tokens: int
    draws: bool  # the share reaches the last token, so its logits give the next one


class NothingScheduled(RuntimeError):
    """Requests wait and nothing runs. An engine steps because somebody waits: it would go on like this for ever."""

    def __init__(self) -> None:
        super().__init__("requests wait and nothing was scheduled: the scheduler or the cache lets none of them in")


@dataclass(slots=True)
class SchedulerOutput:
    """One step: sequences with a single new token first."""

    scheduled: list[ScheduledSequence] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """T: tokens computed in this step."""
        return sum(item.num_new_tokens for item in self.scheduled)

    def add(self, seq: Sequence, num_new_tokens: int) -> None:
        """Schedule the next `num_new_tokens` of `seq`, which count as computed from here on."""
        start = seq.num_computed_tokens
        seq.num_computed_tokens += num_new_tokens
        self.scheduled.append(ScheduledSequence(seq, start, num_new_tokens, seq.num_uncomputed_tokens == 0))


class SchedulerLike(Protocol):
    """What the engine asks of a scheduler."""

    @property
    def waiting(self) -> SequenceOf[Sequence]:
        """Sequences that hold no cache, in the order in which they will be served."""

    @property
    def running(self) -> SequenceOf[Sequence]:
        """Sequences that are being served."""

    def add(self, seq: Sequence) -> None:
        """Queue a new sequence."""

    def abort(self, seq: Sequence) -> None:
        """End a sequence at once and give back what it holds."""

    def schedule(self) -> SchedulerOutput:
        """Decide the next step."""

    def postprocess(self, output: SchedulerOutput, token_ids: Iterable[int]) -> list[Sequence]:
        """Take in what the step drew; returns the sequences that got a token."""


class SerialScheduler:
    """One request at a time, first come, first served: the whole prompt in one step, then a token a step."""

    def __init__(self) -> None:
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []

    def add(self, seq: Sequence) -> None:
        """Queue a new sequence."""
        self.waiting.append(seq)

    def abort(self, seq: Sequence) -> None:
        """End a sequence at once."""
        (self.waiting if seq.status is SequenceStatus.WAITING else self.running).remove(seq)
        seq.status = SequenceStatus.FINISHED_ABORTED

    def schedule(self) -> SchedulerOutput:
        """All tokens of the current sequence that are not computed yet."""
        if not self.running and self.waiting:
            seq = self.waiting.popleft()
            seq.status = SequenceStatus.RUNNING
            self.running.append(seq)
        output = SchedulerOutput()
        for seq in self.running:
            output.add(seq, seq.num_uncomputed_tokens)
        return output

    def postprocess(self, output: SchedulerOutput, token_ids: Iterable[int]) -> list[Sequence]:
        """Append the token; leave when it ends the answer."""
        for item, token_id in zip(output.scheduled, token_ids, strict=True):
            seq = item.seq
            seq.append_token(token_id)
            seq.detokenizer.append(token_id)
            if (status := check_stop_conditions(seq)) is not None:
                seq.status = status
                self.running.remove(seq)
        return [item.seq for item in output.scheduled]


TokensOfStep = Callable[[Sequence, int], int]  # (sequence, budget) -> tokens to compute in this step
MakeRoom = Callable[["Scheduler", list[Sequence]], Sequence | None]  # -> the sequence that gave way, if any


class Scheduler:
    """Continuous batching (Orca, Yu et al., OSDI 2022): who takes part is decided anew at every step.

    A new request joins at any step and a finished one leaves at once. Two steps of the work are chosen when the engine
    is put together: `tokens_of_step(seq, budget)` says how many tokens of a sequence a step may compute, and
    `make_room(scheduler, candidates)` what happens when the cache is full.

    Invariants: `waiting` is ordered by (priority, arrival); a sequence is in exactly one of `waiting` and `running`, or
    finished; only running sequences hold cache.
    """

    def __init__(
        self,
        kv: KVCacheManager,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        tokens_of_step: TokensOfStep,
        make_room: MakeRoom,
        by_priority: bool = False,
    ) -> None:
        self.kv = kv
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._tokens_of_step = tokens_of_step
        self._make_room = make_room
        self._by_priority = by_priority

    def add(self, seq: Sequence) -> None:
        """Queue a sequence behind those that come before it."""
        bisect.insort(self.waiting, seq, key=self.rank)

    def rank(self, seq: Sequence) -> tuple[int, int]:
        """Who goes first: smaller is earlier."""
        return (seq.priority if self._by_priority else 0, seq.arrival)

    def abort(self, seq: Sequence) -> None:
        """End a sequence at once and give back what it holds."""
        (self.waiting if seq.status is SequenceStatus.WAITING else self.running).remove(seq)
        seq.finish(SequenceStatus.FINISHED_ABORTED)
        self.kv.free(seq)

    def schedule(self) -> SchedulerOutput:
        """Decide the next step: first those that run, then as many of those that wait as fit.

        1. Running sequences, decodes (one uncomputed token) before the rest: each gets `_tokens_of_step(seq, budget)`
           tokens if `_reserve(seq, n, rest, output)` finds room, else none, and the next is asked. `rest` is the list
           of those that come after it; `_reserve` takes out whoever gives way, who has no part in this step then.
        2. Waiting sequences, in order, while fewer than `max_num_seqs` run and nobody was preempted in this step:
           `kv.match(seq)`, then its tokens of this step. If they are 0 or `kv.reserve` fails, it and all behind it wait
           (`kv.free(seq)` gives back what it matched): overtaking would let short requests starve a long one. Else it
           leaves `waiting`, starts, and runs.

        Every scheduled sequence goes to `SchedulerOutput.add(seq, n)`, and `n` off the budget, which begins at
        `max_num_batched_tokens` and is never exceeded.
        """
        output, budget = SchedulerOutput(), self._max_num_batched_tokens
        pending = sorted(self.running, key=lambda seq: seq.num_uncomputed_tokens > 1)
        while pending:
            seq = pending.pop(0)
            n = self._tokens_of_step(seq, budget)
            if n and self._reserve(seq, n, pending, output):
                output.add(seq, n)
                budget -= n
        while self.waiting and not output.preempted and len(self.running) < self._max_num_seqs:
            seq = self.waiting[0]
            self.kv.match(seq)
            n = self._tokens_of_step(seq, budget)
            if n == 0 or not self.kv.reserve(seq, n):
                self.kv.free(seq)
                break
            self.waiting.pop(0)
            seq.start()
            self.running.append(seq)
            output.add(seq, n)
            budget -= n
        return output

    def _reserve(self, seq: Sequence, num_new_tokens: int, rest: list[Sequence], output: SchedulerOutput) -> bool:
        """Cache for a running sequence, at the cost of others of `rest` or of its own place if need be."""
        while not self.kv.reserve(seq, num_new_tokens):
            victim = self._make_room(self, [seq, *rest])
            if victim is None:
                return False
            output.preempted.append(victim)
            if victim is seq:
                return False
            rest.remove(victim)
        return True

    def postprocess(self, output: SchedulerOutput, token_ids: Iterable[int]) -> list[Sequence]:
        """Take in the tokens that a step drew, one for each scheduled sequence, in order.

        For each: the K/V of its tokens is written now (`kv.publish(seq)`). A share that did not reach the last token of
        the sequence (`item.draws` is False) has no next token: its row is ignored. Else the token is appended, to the
        sequence and to its detokenizer, and `check_stop_conditions` asked: a sequence that ends takes its status,
        leaves `running` and frees its cache in this very step, so that the next one can use it.

        Returns:
            The sequences that got a token.
        """
        updated = []
        for item, token_id in zip(output.scheduled, token_ids, strict=True):
            seq = item.seq
            self.kv.publish(seq)
            if not item.draws:
                continue
            seq.append_token(token_id)
            seq.detokenizer.append(token_id)
            updated.append(seq)
            if (status := check_stop_conditions(seq)) is not None:
                seq.finish(status)
                self.running.remove(seq)
                self.kv.free(seq)
        return updated


def whole_prompt(seq: Sequence, budget: int) -> int:
    """All uncomputed tokens of `seq`, or none: a prompt is computed in one step."""
    return seq.num_uncomputed_tokens if seq.num_uncomputed_tokens <= budget else 0


def chunk(seq: Sequence, budget: int, threshold: int = 0) -> int:
    """As many uncomputed tokens of `seq` as the budget has left, and no more than `threshold` if that is not 0.

    So a long prompt is computed over several steps, beside the decodes of others (chunked prefill; Sarathi-Serve,
    Agrawal et al., OSDI 2024). An empty budget leaves 0: not in this step.
    """
    n = min(seq.num_uncomputed_tokens, budget)
    return min(n, threshold) if threshold else n


def wait(scheduler: Scheduler, candidates: list[Sequence]) -> Sequence | None:
    """No room: nobody gives way. A block, once given, has room for all of a sequence, so this stays a formality."""
    return None


def preempt(scheduler: Scheduler, candidates: list[Sequence]) -> Sequence | None:
    """No room: the candidate that ranks last goes back to `waiting` and gives up its cache.

    Its tokens are kept and computed again when it resumes (recomputation), so its text does not change. The first
    candidate in rank is never the victim unless it is alone, so somebody always advances.

    Args:
        candidates: running sequences that are not scheduled in this step yet; the one that needs room comes first.

    Returns:
        The victim, which has left `running`, freed its cache (`kv.free`), turned to WAITING (`requeue`) and been
        queued again by rank (`scheduler.add`): ahead of all that arrived later, behind all that are more urgent.
    """
    victim = max(candidates, key=scheduler.rank)
    scheduler.running.remove(victim)
    scheduler.kv.free(victim)
    victim.requeue()
    scheduler.add(victim)
    return victim
