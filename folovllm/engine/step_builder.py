"""Puts a step together: which sequence has which row, what the devices know of it, how much of the budget is left."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np

from folovllm.event_stream import Events
from folovllm.events import Refused, StepBegan
from folovllm.request import Sequence
from folovllm.step.schedule import NO_SNAPSHOT, SamplingSpec, ScheduledSequence, SchedulerOutput, Scores

NO_TOKENS = np.empty(0, np.int32)  # of a sequence whose one token is in flight


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

    def __init__(
        self, num_rows: int, events: Events | None = None, waiting: Callable[[], SequenceOf[Sequence]] = tuple
    ) -> None:
        self.num_rows = num_rows
        self.events = Events() if events is None else events
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
        tokens = seq.tokens(start, end) if start < seq.num_tokens else NO_TOKENS
        scores = None if seq.request.params.prompt_logprobs is None else scores_of(seq, start, end)
        load_state = NO_SNAPSHOT if sampling is None else seq.load_state
        return ScheduledSequence(
            seq.seq_id, row.number, start, num_new_tokens, tokens, new_blocks, num_sent, num_samples, sampling, scores,
            load_state, seq.save_state,
        )  # fmt: skip


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
        """Note a preemption. If the victim was scheduled already, it leaves the step and gives its budget back.

        Returns:
            The tokens that it gives back.
        """
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
        output = SchedulerOutput(tuple(self._scheduled_seqs.values()), tuple(self.preempted))
        if self._rows.events.on:
            self._report(output)
        self._rows.num_steps += bool(self._scheduled_seqs)
        self._rows.has_preempted = bool(self.preempted)
        return output

    def _report(self, output: SchedulerOutput) -> None:
        rows, waiting = self._rows, self._rows.waiting()
        if waiting and len(self._running) >= rows.num_rows:
            rows.events.emit(Refused(waiting[0].seq_id, "sequences"))
        if output.scheduled_seqs:
            rows.events.emit(StepBegan(rows.num_steps, self._start, time.monotonic(), output, max(0, self.budget)))


def scores_of(seq: Sequence, start: int, end: int) -> Scores | None:
    """The tokens of the prompt that tokens `start` to `end` predict, and whose scores have not come yet."""
    if not seq.num_unscored_tokens:
        return None
    first = max(start, len(seq.prompt_logprobs))  # the token behind it is the first without a score
    tokens = seq.tokens(first + 1, min(end + 1, seq.num_prompt_tokens))
    return Scores(first - start, tokens, seq.params.prompt_logprobs or 0) if len(tokens) else None


def sampling_spec(seq: Sequence) -> SamplingSpec:
    """What a device must know to sample for `seq`. With a grammar, the bitmask holds the rules about allowed and stop tokens."""
    p = seq.params
    has_grammar = p.structured_outputs is not None
    return SamplingSpec(
        seed=seq.seed,
        temperature=p.temperature,
        top_k=p.top_k,
        top_p=p.top_p,
        min_p=p.min_p,
        repetition_penalty=p.repetition_penalty,
        presence_penalty=p.presence_penalty,
        frequency_penalty=p.frequency_penalty,
        logprobs=p.logprobs,
        first_end=seq.num_prompt_tokens + p.min_tokens,
        forbidden=() if has_grammar or not p.min_tokens else tuple(sorted({*seq.eos_token_ids, *p.stop_token_ids})),
        num_prompt_tokens=seq.num_prompt_tokens,
        allowed=None if has_grammar or p.allowed_token_ids is None else tuple(p.allowed_token_ids),
        has_grammar=has_grammar,
        bad_words=seq.request.bad_words,
        bias=tuple((p.logit_bias or {}).items()),
        history=seq.token_ids if p.has_penalties or seq.request.bad_words else seq.token_ids[:0],
    )
