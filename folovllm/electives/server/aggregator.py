"""From the engine's events to what a server must know: what is new in each answer, and how busy the engine is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from msgspec.structs import replace

from folovllm.electives.server.messages import Delta, Refused, SchedulerStats, Step
from folovllm.engine import events as ev


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
    no delta for such. Rows of log-probabilities are there for the sequences that asked for them, those of the prompt first.
    """
    deltas = []
    for i, (scheduled, sampled) in enumerate(zip(step.output.scheduled_seqs, step.result.token_ids, strict=True)):
        answer = served.get(scheduled.seq_id)
        if answer is not None and (sampled or scheduled.scores is not None):
            rows, of_prompt = step.result.logprobs.get(i), None
            if rows is not None and scheduled.scores is not None:
                num_scores = len(scheduled.scores.token_ids)
                rows, of_prompt = rows[num_scores:], rows[:num_scores]
            cached = answer.num_cached_tokens or 0
            deltas.append(Delta(answer.number, answer.index, sampled, None, cached, rows, of_prompt))
    return deltas


class Aggregator:
    """Reduces events, in their order, to the deltas of each answer and to the state of the engine."""

    def __init__(self, has_prefix_cache: bool) -> None:
        self._has_prefix_cache = has_prefix_cache
        self._served: dict[int, Served] = {}  # by seq_id
        self._deltas: list[Delta] = []
        self._queue_times: list[float] = []
        self._admitted: list[Served] = []  # for the first time, by the step that is about to begin
        self._stats = SchedulerStats()

    def take(self, events: Iterable[ev.Event], refused: list[Refused]) -> Step:
        """The message about these events, which happened since the last call, and about requests that were refused."""
        for event in events:
            self._update(event)
        stats = replace(self._stats, num_waiting=len(self._served) - self._stats.num_running)
        step = Step(self._deltas, stats, refused, self._queue_times)
        self._deltas, self._queue_times = [], []
        return step

    def _update(self, event: ev.Event) -> None:
        stats, served = self._stats, self._served
        match event:
            case ev.BlockClaimed():
                stats.kv_blocks_used += 1
            case ev.BlockFreed():
                stats.kv_blocks_used -= 1
            case ev.StepBegan():
                self._queue_times += [event.scheduled - answer.arrival for answer in self._admitted]
                self._admitted.clear()
            case ev.StepEnded():
                self._deltas += deltas_of(event, served)
            case ev.DraftsVerified():
                stats.num_drafts += 1
                stats.num_draft_tokens += event.num_draft_tokens
                stats.num_accepted += event.num_accepted
            case ev.BlocksMoved(what, place, num_blocks):
                moved = stats.moved.get(f"{what}_{place}", 0) + num_blocks
                stats.moved = stats.moved | {f"{what}_{place}": moved}  # a message may have the old dictionary
            case ev.RequestAdded(seq_id, request_id, index, prompt):
                served[seq_id] = Served(int(request_id), index, event.time, len(prompt))
            case ev.Admitted():
                self._let_in(served[event.seq_id], event.num_cached_tokens)
            case ev.Preempted():
                stats.num_preemptions += 1
                stats.num_running -= 1
                served[event.seq_id].is_running = False
            case ev.Finished():
                self._end(self._gone(event.seq_id), event.reason)
            case ev.GivenUp():  # the engine alone decided this end, so the reader must hear of it; other aborts are the reader's own
                answer = served[event.seq_id]
                self._deltas.append(Delta(answer.number, answer.index, [], "abort", answer.num_cached_tokens or 0))
            case ev.Aborted():
                self._gone(event.seq_id)
            case ev.Snapshot():  # the engine was idle when it was subscribed to: nobody is served yet
                stats.kv_blocks_total = event.num_blocks
                stats.kv_blocks_used = sum(not block.is_free for block in event.blocks)

    def _let_in(self, answer: Served, num_cached_tokens: int) -> None:
        self._stats.num_running += 1
        answer.is_running = True
        if answer.num_cached_tokens is None:
            answer.num_cached_tokens = num_cached_tokens
            self._admitted.append(answer)
            self._stats.prefix_tokens += answer.num_prompt_tokens * self._has_prefix_cache
            self._stats.prefix_tokens_hit += num_cached_tokens

    def _end(self, answer: Served, reason: str) -> None:
        """Add the end to the delta of the last tokens: a reader that got these first would take a stop token for text."""
        of_it = (i for i, d in enumerate(self._deltas) if (d.number, d.index) == (answer.number, answer.index))
        last = max(of_it)  # there is one: the step that ended it sampled for it
        self._deltas[last] = replace(self._deltas[last], finish_reason=reason)

    def _gone(self, seq_id: int) -> Served:
        answer = self._served.pop(seq_id)
        self._stats.num_running -= answer.is_running
        return answer
