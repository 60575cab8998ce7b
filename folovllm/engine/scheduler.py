"""Decides which sequences take part in the next step, and with how many tokens."""

from __future__ import annotations

import bisect
import time
from collections.abc import Callable, Collection, Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Protocol

from folovllm.cache.manager import KVCacheManager
from folovllm.engine.events import Aborted, Admitted, Budget, Preempted, Refused, StepBegan
from folovllm.engine.logprobs import scores_of
from folovllm.engine.stop import check_stop_conditions
from folovllm.request import Sequence, SequenceOutput, SequenceStatus, sampling_spec
from folovllm.step.schedule import NO_TOKENS, ScheduledSequence, SchedulerOutput


class SchedulerLike(Protocol):
    """What the engine asks of a scheduler."""

    @property
    def kv(self) -> KVCacheManager | None:
        """Who hands out the KV cache; None where each sequence grows one of its own."""

    @property
    def waiting(self) -> SequenceOf[Sequence]:
        """Sequences that hold no cache, in the order in which they will be served."""

    @property
    def running(self) -> SequenceOf[Sequence]:
        """Sequences that are being served."""

    def add(self, seq: Sequence) -> None:
        """Queue a new sequence."""

    def abort(self, *seqs: Sequence) -> None:
        """End sequences at once and give back what they hold."""

    def schedule(self) -> SchedulerOutput:
        """Decide the next step."""

    def sequences(self, output: SchedulerOutput) -> list[Sequence]:
        """The sequences of the step that was decided last, in their order."""

    def postprocess(self, sampled: Iterable[tuple[Sequence, list[int]]]) -> list[SequenceOutput]:
        """Append the tokens that a step sampled, sequence by sequence; returns what came of it, as `Scheduler.postprocess`."""


@dataclass(slots=True)
class BatchRow:
    """A running sequence's place in the devices' tables."""

    number: int
    seq: Sequence
    num_sent: int = 0  # entries of its block table that the devices know


class BatchRows:
    """The rows of running sequences, and what each sequence brings into a step: a `ScheduledSequence`.

    Invariants: a sequence has one row, its own, from its first step until it no longer runs; the devices know all of
    its block table but what the next `ScheduledSequence.new_blocks` will say.
    """

    def __init__(self, num_rows: int, kv: KVCacheManager, waiting: Callable[[], SequenceOf[Sequence]] = tuple) -> None:
        self.num_rows = num_rows
        self.kv, self.events = kv, kv.events
        self.waiting = waiting  # the sequences that wait for a row
        self.num_steps = 0  # scheduled so far
        self.has_preempted = False  # whether a sequence was preempted in the last step
        self._free = list(reversed(range(num_rows)))
        self._rows: dict[int, BatchRow] = {}  # by seq_id

    def release(self, running: Iterable[Sequence]) -> None:
        """Take back the rows of sequences that no longer run."""
        for seq_id in self._rows.keys() - {seq.seq_id for seq in running}:
            self._free.append(self._rows.pop(seq_id).number)

    def owners(self, output: SchedulerOutput) -> list[Sequence]:
        """The sequences of the step that was scheduled last, in its order."""
        return [self._rows[scheduled.seq_id].seq for scheduled in output.scheduled_seqs]

    def maker(self) -> Callable[[Sequence, int], ScheduledSequence]:
        """Return what makes the `ScheduledSequence`s of the next step."""
        return self.scheduled

    def scheduled(self, seq: Sequence, num_new_tokens: int) -> ScheduledSequence:
        """The next `num_new_tokens` of `seq`, whose blocks are in its table by now."""
        row, sampling = self._rows.get(seq.seq_id), None
        if row is None:
            if not self._free:
                raise RuntimeError("more sequences run than max_num_seqs allows: the scheduler let too many in")
            row = self._rows[seq.seq_id] = BatchRow(self._free.pop(), seq)
            sampling = sampling_spec(seq)
        start, num_sent, table = seq.num_computed_tokens, row.num_sent, seq.block_table
        new_blocks: tuple[int, ...] = ()
        if len(table) > num_sent:
            new_blocks, row.num_sent = tuple(table[num_sent:]), len(table)
        end = start + num_new_tokens
        num_samples = int(end >= seq.num_tokens)  # the last token that the host knows, or one that is in flight
        tokens = seq.tokens(start, end) if start < seq.num_tokens else NO_TOKENS  # else its one token is in flight
        scores = None if seq.params.prompt_logprobs is None else scores_of(seq, start, end)
        return ScheduledSequence(
            seq.seq_id, row.number, start, end, tokens, new_blocks, num_sent, num_samples, sampling, scores
        )


class StepBuilder:
    """Collects the `ScheduledSequence`s of one step, and keeps its token budget."""

    def __init__(self, rows: BatchRows, running: Collection[Sequence], budget: int) -> None:
        self._start = time.monotonic() if rows.events.on else 0.0
        rows.release(running)
        self.budget = budget  # tokens that the step may still compute
        self.preempted: list[int] = []  # by seq_id
        self._rows, self._make = rows, rows.maker()
        self._running = running
        self._scheduled_seqs: dict[int, ScheduledSequence] = {}  # by seq_id
        self._added: list[Sequence] = []

    def add(self, seq: Sequence, num_new_tokens: int) -> None:
        """Schedule the next `num_new_tokens` of `seq`; they count as computed from here on."""
        self._scheduled_seqs[seq.seq_id] = self._make(seq, num_new_tokens)
        self._added.append(seq)
        seq.num_computed_tokens += num_new_tokens
        self.budget -= num_new_tokens

    def withdraw(self, victim: Sequence) -> int:
        """Note a preemption. Returns the victim's tokens that were scheduled already: they leave the step, back to its budget."""
        self.preempted.append(victim.seq_id)
        scheduled = self._scheduled_seqs.pop(victim.seq_id, None)
        num_tokens = 0 if scheduled is None else scheduled.num_new_tokens
        self.budget += num_tokens
        return num_tokens

    def take_added(self) -> list[Sequence]:
        """The sequences added since the last call. Called when the step preempts no more, so that they stay in it."""
        added, self._added = self._added, []
        return added

    def output(self) -> SchedulerOutput:
        """Return the finished step, a value."""
        rows, scheduled_seqs = self._rows, tuple(self._scheduled_seqs.values())
        extras = None if rows.kv.step_extras is None else rows.kv.step_extras(scheduled_seqs)
        output = SchedulerOutput(scheduled_seqs, tuple(self.preempted), extras)
        if rows.events.on:
            self._report(output)
        rows.num_steps += bool(scheduled_seqs)
        rows.has_preempted = bool(self.preempted)
        return output

    def _report(self, output: SchedulerOutput) -> None:
        rows, waiting = self._rows, self._rows.waiting()
        if waiting and len(self._running) >= rows.num_rows:
            rows.events.emit(Refused(waiting[0].seq_id, "sequences"))
        if output.scheduled_seqs:
            rows.events.emit(StepBegan(rows.num_steps, self._start, time.monotonic(), output, max(0, self.budget)))


TokensOfStep = Callable[[Sequence, int], int]  # (sequence, budget) -> tokens to compute in this step
OnFull = Callable[["Scheduler", list[Sequence]], Sequence | None]  # (scheduler, running) -> the victim, if any


class Scheduler:
    """Continuous batching (Orca, Yu et al., OSDI 2022): who takes part is decided anew at every step.

    A new request joins at any step and a finished one leaves at once. Two steps of the work are chosen when the engine
    is put together: `tokens_of_step(seq, budget)` says how many tokens of a sequence a step may compute, and
    `on_full(scheduler, running)` what happens when the cache is full.

    Invariants: `waiting` is ordered by `rank`; a sequence is in exactly one of `waiting` and `running`, or finished; only
    running sequences hold cache.
    """

    def __init__(
        self,
        kv: KVCacheManager,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        tokens_of_step: TokensOfStep,
        on_full: OnFull,
        by_priority: bool = False,
    ) -> None:
        self.kv = kv
        self.events = kv.events
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self._rows = BatchRows(max_num_seqs, kv, lambda: self.waiting)
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._tokens_of_step = tokens_of_step
        self._on_full = on_full
        self._by_priority = by_priority

    def add(self, seq: Sequence) -> None:
        """Queue a sequence in its place by `rank`."""
        bisect.insort(self.waiting, seq, key=self.rank)

    def rank(self, seq: Sequence) -> tuple[int, int]:
        """The order of service: the smallest goes first."""
        return (seq.request.priority if self._by_priority else 0, seq.seq_id)

    def abort(self, *seqs: Sequence) -> None:
        gone = set(seqs)  # one pass for all: to remove each by itself is quadratic
        self.waiting = [seq for seq in self.waiting if seq not in gone]
        self.running = [seq for seq in self.running if seq not in gone]
        for seq in seqs:
            seq.finish(SequenceStatus.FINISHED_ABORTED)
            self.kv.free(seq)
            if self.events.on:
                self.events.emit(Aborted(seq.seq_id))

    def schedule(self) -> SchedulerOutput:
        """Decide the next step: first those that run, then as many of those that wait as fit.

        1. Running sequences, decodes (one uncomputed token) before the rest: each gets
           `_tokens_of_step(seq, builder.budget)` tokens if `_grow(seq, n, builder)` finds room for them, else none,
           and the next is asked.
        2. Waiting sequences, in order, while fewer than `max_num_seqs` run: `_admit(seq, builder)` finds room for the
           first tokens of one and says how many they are. If none, it and all behind it wait: overtaking would let short
           requests starve a long one. Else it leaves `waiting`, starts, and runs.

        What a sequence gets goes to `builder.add(seq, n)`, which takes n off `builder.budget`.

        Returns:
            `builder.output()`.
        """
        builder = StepBuilder(self._rows, self.running, self._max_num_batched_tokens)
        for seq in sorted(self.running, key=lambda seq: seq.num_tokens - seq.num_computed_tokens > 1):
            n = self._tokens_of_step(seq, builder.budget)
            if n and self._grow(seq, n, builder):
                builder.add(seq, n)
        while self.waiting and len(self.running) < self._max_num_seqs:
            seq = self.waiting[0]
            n = self._admit(seq, builder)
            if n == 0:
                break
            self.waiting.pop(0)
            seq.start()
            self.running.append(seq)
            builder.add(seq, n)
        return builder.output()

    def sequences(self, output: SchedulerOutput) -> list[Sequence]:
        return self._rows.owners(output)

    @property
    def has_preempted(self) -> bool:
        """Whether a sequence gave way when a step was scheduled last, so that the next one has room."""
        return self._rows.has_preempted

    def must_wait(self) -> bool:
        """Whether the next step can be scheduled only after the tokens in flight have arrived (M6).

        That is so if a sequence may have to give way: its tokens are computed again, so the host must know all of them.
        """
        budget, size, num_free = self._max_num_batched_tokens, self.kv.block_size, self.kv.num_free
        if num_free > len(self.running) + budget // size:  # room for any step: no need to look closer
            return False
        missing = [max(1, seq.num_tokens - seq.num_computed_tokens) for seq in self.running]
        return num_free < sum(min(n, budget) // size + 1 for n in missing)

    def _grow(self, seq: Sequence, num_new_tokens: int, builder: StepBuilder) -> bool:
        """Find cache for a running sequence: those that rank behind it give way, and at last itself. False if it has none after all."""
        if seq.seq_id in builder.preempted:
            return False
        while not self.kv.allocate_slots(seq, num_new_tokens):
            had = {running.seq_id: running.num_computed_tokens for running in self.running} if self.events.on else {}
            victim = self._on_full(self, self.running)
            if victim is None:
                return False
            withdrawn = builder.withdraw(victim)
            if had:
                self.events.emit(Preempted(victim.seq_id, seq.seq_id, had[victim.seq_id] - withdrawn))
            if victim is seq:
                return False
        return True

    def _admit(self, seq: Sequence, builder: StepBuilder) -> int:
        """Find cache for the first tokens of `seq`, the first that waits. Returns how many tokens, or 0 if it must wait.

        No sequence is admitted after a preemption: the victim's room is for the running sequences.
        """
        if builder.preempted:
            return self._refuse(seq, "preemption")
        self.kv.cache_scheduled_blocks(builder.take_added())
        self.kv.get_computed_blocks(seq)
        n = self._tokens_of_step(seq, builder.budget)
        if n == 0 or not self.kv.allocate_slots(seq, n):
            self.kv.free(seq)
            return self._refuse(seq, "blocks" if n else "tokens")
        if self.events.on:
            self.events.emit(Admitted(seq.seq_id, seq.num_computed_tokens))
        return n

    def _refuse(self, seq: Sequence, budget: Budget) -> int:
        """Report why no more sequences are admitted; returns the tokens that `seq` gets: 0."""
        if self.events.on:
            self.events.emit(Refused(seq.seq_id, budget))
        return 0

    def postprocess(self, sampled: Iterable[tuple[Sequence, list[int]]]) -> list[SequenceOutput]:
        """Append the tokens that a step sampled, and end what they end (vLLM's `update_from_output`).

        `sampled` has each sequence of the step, in order, with a list of tokens. For each: the K/V of its computed tokens is
        written now (`kv.cache_blocks(seq)`). The list is empty in the middle of a prompt, after which there is nothing to
        sample. Each token is appended, to the sequence and to its detokenizer, and `check_stop_conditions` asked: a sequence
        that ends takes its status, leaves `running` and frees its cache in this very step, so that the next one can use it;
        what is left of its list is dropped.

        Returns:
            For each sequence that got a token, in the order of `sampled`: `SequenceOutput(seq, new_token_ids, status)`, with the
            tokens that were appended and the status with which it ended, None if it goes on. Nobody else looks for what is new.
        """
        outputs = []
        for seq, token_ids in sampled:
            self.kv.cache_blocks(seq)
            new_token_ids, status = list[int](), None
            for token_id in token_ids:
                seq.append_token(token_id)
                seq.detokenizer.append(token_id)
                new_token_ids.append(token_id)
                if (status := check_stop_conditions(seq)) is not None:
                    seq.finish(status)
                    self.running.remove(seq)
                    self.kv.free(seq)
                    break
            if new_token_ids:
                outputs.append(SequenceOutput(seq, new_token_ids, status))
        return outputs


def will_finish(seq: Sequence) -> bool:
    """Whether the tokens in flight bring the answer to its full length: each computed token brings the one after it."""
    return seq.num_computed_tokens + 1 >= seq.num_prompt_tokens + seq.max_tokens


def unless_finished(tokens_of_step: TokensOfStep) -> TokensOfStep:
    """`tokens_of_step` for steps whose tokens arrive late (M6): none for a sequence that `will_finish`."""
    return lambda seq, budget: 0 if will_finish(seq) else tokens_of_step(seq, budget)


def whole_prompt(seq: Sequence, budget: int) -> int:
    """All uncomputed tokens of `seq`, or none: a prompt is computed in one step."""
    return seq.num_uncomputed_tokens if seq.num_uncomputed_tokens <= budget else 0


def chunk(seq: Sequence, budget: int, threshold: int = 0) -> int:
    """As many uncomputed tokens of `seq` as the budget has left, and no more than `threshold` if that is not 0.

    So a long prompt is computed over several steps, beside the decodes of others (chunked prefill; Sarathi-Serve,
    Agrawal et al., OSDI 2024). An empty budget leaves 0: not in this step.
    """
    n = min(max(1, seq.num_tokens - seq.num_computed_tokens), budget)
    return min(n, threshold) if threshold else n


def wait(scheduler: Scheduler, candidates: list[Sequence]) -> Sequence | None:
    """No room: nobody gives way. With slots this never happens, for a slot has room for a whole sequence."""
    return None


def preempt(scheduler: Scheduler, candidates: list[Sequence]) -> Sequence | None:
    """No room: the candidate that ranks last goes back to `waiting` and gives up its cache.

    Its tokens are kept and computed again when it resumes (recomputation), so its text does not change. The first
    candidate in rank is never the victim unless it is alone, so one sequence always advances; and no sequence loses
    cache to one that ranks behind it.

    Args:
        candidates: all running sequences (one or more), in any order; one of them needs room.

    Returns:
        The victim (None is `wait`'s answer), which has left `running`, freed its cache (`kv.free`), turned to WAITING (`requeue`) and been
        queued again by rank (`scheduler.add`): ahead of all that arrived later, behind all that are more urgent.
    """
    victim = max(candidates, key=scheduler.rank)
    scheduler.running.remove(victim)
    scheduler.kv.free(victim)
    victim.requeue()
    scheduler.add(victim)
    return victim
