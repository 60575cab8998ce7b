"""The requests that the engine works on: what a step brings to each, and how many of them have no token yet."""

from __future__ import annotations

import asyncio
from collections import Counter

from folovllm.faults import RequestFailed
from folovllm.server.messages import Delta, Refused, Step, failure_of
from folovllm.server.metrics import Counters
from folovllm.server.stream import Stream


class OpenRequests:
    """The streams of the requests that are not over, found by their number or by their id.

    Invariant: the sequences of a request count as queued from `add` to its first token, or to its end if it gets none.
    """

    def __init__(self) -> None:
        self._by_number: dict[int, Stream] = {}
        self._by_id: dict[str, Stream] = {}
        self._queued: set[int] = set()  # numbers
        self.num_queued = self.num_queued_tokens = 0  # sequences, and the tokens of their prompts
        self.counters = Counters()
        self.is_empty = asyncio.Event()
        self.is_empty.set()

    def __len__(self) -> int:
        return len(self._by_number)

    def all(self) -> list[Stream]:
        """A copy, so that requests may end while the caller goes through it."""
        return list(self._by_number.values())

    def get(self, number: int) -> Stream | None:
        """The request of this number, if it is not over."""
        return self._by_number.get(number)

    def named(self, request_id: str) -> Stream | None:
        """The request of this id, if it is not over."""
        return self._by_id.get(request_id)

    def add(self, stream: Stream) -> None:
        """A request is handed to the engine."""
        self._by_number[stream.number] = self._by_id[stream.request_id] = stream
        self._queued.add(stream.number)
        self.num_queued += len(stream.state.seqs)
        self.num_queued_tokens += stream.state.metrics.num_prompt_tokens
        self.is_empty.clear()

    def update(self, step: Step, now: float) -> list[int]:
        """Give each request what the step brought for it. Those that end leave.

        Returns:
            The numbers of those that failed at it here: the engine still works on them.
        """
        before: Counter[float] = Counter()  # when answers got the tokens before these: mostly one step ago, all of them
        failed: list[Refused] = []
        for delta in step.deltas:
            stream = self.get(delta.number)
            if stream is None:  # aborted here, and the engine has not heard of it yet
                continue
            try:
                self._give(stream, delta, now, before)
            except BaseException as error:
                failed.append(failure_of(stream.number, error))
                self._refuse(failed[-1])
        self.counters.record_step(now, before, step.queue_times)
        for refused in step.refused:
            self._refuse(refused)
        return [each.number for each in failed]

    def _give(self, stream: Stream, delta: Delta, now: float, before: Counter[float]) -> None:
        """Give a request new tokens; `before` counts the times at which its answer got those before them."""
        if delta.token_ids:
            if not stream.has_begun:
                self._leave_queue(stream)
                self.counters.record_start(stream, now)
            if (last := stream.newest[delta.index]) is not None:
                before[last] += 1
            self.counters.generation_tokens += len(delta.token_ids)
        stream.feed(delta, now)
        if stream.is_finished:
            self.end(stream)

    def _refuse(self, refused: Refused) -> None:
        if (stream := self.get(refused.number)) is not None:
            self.fail(stream, RequestFailed([str(refused.number)]) if refused.is_fault else ValueError(refused.message))

    def end(self, stream: Stream) -> None:
        """The engine works on it no more."""
        self._remove(stream)
        self.counters.record_end(stream)

    def fail(self, stream: Stream, error: Exception) -> None:
        """End a request with an error, which its reader gets. No counter counts it."""
        stream.fail(error)
        self._remove(stream)

    def _leave_queue(self, stream: Stream) -> None:
        if stream.number in self._queued:
            self._queued.remove(stream.number)
            self.num_queued -= len(stream.state.seqs)
            self.num_queued_tokens -= stream.state.metrics.num_prompt_tokens

    def _remove(self, stream: Stream) -> None:
        del self._by_number[stream.number], self._by_id[stream.request_id]
        self._leave_queue(stream)
        if not self._by_number:
            self.is_empty.set()
