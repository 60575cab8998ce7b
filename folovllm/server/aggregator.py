"""From the engine's events to what a server must know: what is new in each answer, and how busy the engine is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from folovllm import events as ev
from folovllm.server.messages import Delta, SchedulerStats
from folovllm.step.sampling_spec import Logprobs
from folovllm.step.schedule import ScheduledSequence


@dataclass(slots=True)
class Served:
    """An answer that the engine works on."""

    number: int  # of the request
    index: int  # among its answers
    arrival: float
    num_prompt_tokens: int
    num_cached_tokens: int | None = None  # None until it is let in
    is_running: bool = False


def deltas_of(step: ev.StepEnded, served: Mapping[int, Served]) -> list[Delta]:
    """The tokens that a step sampled, an answer at a time; `served` has the answers by their `seq_id`.

    A scheduled sequence may sample nothing (its prompt is not done), and may have ended while the step was under way: there is
    no delta for such. Rows of log-probabilities are there for the shares that asked for them, those of the prompt first.
    """
    token_ids, logprobs = step.result.token_ids, step.result.logprobs
    return [
        Delta(
            answer.number,
            answer.index,
            sampled,
            None,
            answer.num_cached_tokens or 0,
            *split(scheduled, logprobs.get(i)),
        )
        for i, (scheduled, sampled) in enumerate(zip(step.output.scheduled_seqs, token_ids, strict=True))
        if (sampled or scheduled.scores is not None) and (answer := served.get(scheduled.seq_id)) is not None
    ]


def split(
    scheduled: ScheduledSequence, rows: list[Logprobs] | None
) -> tuple[list[Logprobs] | None, list[Logprobs] | None]:
    """Rows of the tokens that were sampled, and of the prompt's tokens that were scored."""
    if rows is None or scheduled.scores is None:
        return rows, None
    num_scores = len(scheduled.scores.token_ids)
    return rows[num_scores:], rows[:num_scores]


class Aggregator:
    """Reduces events, in their order, to the deltas of each answer (`take`) and to the state of the engine (`stats`)."""

    def __init__(self, has_prefix_cache: bool) -> None:
        self._has_prefix_cache = has_prefix_cache
        self._served: dict[int, Served] = {}  # by seq_id
        self._deltas: list[Delta] = []
        self._queue_times: list[float] = []
        self._admitted: list[Served] = []  # for the first time, by the step that is about to begin
        self._stats = SchedulerStats()
        self._reducers: dict[type, Callable[[Any], None]] = {
            ev.Snapshot: self._snapshot,
            ev.RequestAdded: self._added,
            ev.Admitted: self._let_in,
            ev.Preempted: self._preempted,
            ev.StepBegan: self._step_began,
            ev.StepEnded: self._step_ended,
            ev.Finished: self._finished,
            ev.GivenUp: self._given_up,
            ev.Aborted: self._aborted,
            ev.DraftsVerified: self._verified,
            ev.BlockClaimed: self._claimed,
            ev.BlockFreed: self._freed,
        }

    def update(self, events: Iterable[ev.Event]) -> None:
        """Take in what happened since the last call."""
        for event in events:
            if (reduce := self._reducers.get(type(event))) is not None:
                reduce(event)

    def take(self) -> tuple[list[Delta], list[float]]:
        """Deltas, and the times that sequences waited in the queue, since the last time."""
        taken = self._deltas, self._queue_times
        self._deltas, self._queue_times = [], []
        return taken

    @property
    def stats(self) -> SchedulerStats:
        """How busy the engine is."""
        return replace(self._stats, num_waiting=len(self._served) - self._stats.num_running)

    def _snapshot(self, event: ev.Snapshot) -> None:
        """The engine was idle when it was subscribed to: nobody is served yet."""
        self._stats.kv_blocks_total = event.num_blocks
        self._stats.kv_blocks_used = sum(not block.is_free for block in event.blocks)

    def _added(self, event: ev.RequestAdded) -> None:
        self._served[event.seq_id] = Served(
            int(event.request_id), event.answer, event.time, len(event.prompt_token_ids)
        )

    def _let_in(self, event: ev.Admitted) -> None:
        answer = self._served[event.seq_id]
        self._stats.num_running += 1
        answer.is_running = True
        if answer.num_cached_tokens is None:
            answer.num_cached_tokens = event.num_cached_tokens
            self._admitted.append(answer)
            self._stats.prefix_tokens += answer.num_prompt_tokens * self._has_prefix_cache
            self._stats.prefix_tokens_hit += event.num_cached_tokens

    def _preempted(self, event: ev.Preempted) -> None:
        self._stats.num_preemptions += 1
        self._stats.num_running -= 1
        self._served[event.seq_id].is_running = False

    def _step_began(self, event: ev.StepBegan) -> None:
        if self._admitted:
            self._queue_times += [event.scheduled - answer.arrival for answer in self._admitted]
            self._admitted.clear()

    def _step_ended(self, event: ev.StepEnded) -> None:
        self._deltas += deltas_of(event, self._served)

    def _finished(self, event: ev.Finished) -> None:
        """Add the end to the delta of the last tokens: a reader that got these first would take a stop token for text."""
        answer = self._gone(event.seq_id)
        of_it = (i for i, d in enumerate(self._deltas) if (d.number, d.index) == (answer.number, answer.index))
        last = max(of_it)  # there is one: the step that ended it sampled for it
        self._deltas[last] = replace(self._deltas[last], finish_reason=event.reason)

    def _given_up(self, event: ev.GivenUp) -> None:
        """The engine alone decided this end, so the reader must hear of it. Any other abort was asked for by the reader."""
        answer = self._served[event.seq_id]
        self._deltas.append(Delta(answer.number, answer.index, [], "abort", answer.num_cached_tokens or 0))

    def _aborted(self, event: ev.Aborted) -> None:
        self._gone(event.seq_id)

    def _gone(self, seq_id: int) -> Served:
        answer = self._served.pop(seq_id)
        self._stats.num_running -= answer.is_running
        return answer

    def _verified(self, event: ev.DraftsVerified) -> None:
        self._stats.num_drafts += 1
        self._stats.num_draft_tokens += event.num_draft_tokens
        self._stats.num_accepted += event.num_accepted

    def _claimed(self, event: ev.BlockClaimed) -> None:
        self._stats.kv_blocks_used += 1

    def _freed(self, event: ev.BlockFreed) -> None:
        self._stats.kv_blocks_used -= 1
