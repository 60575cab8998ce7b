"""The requests that the engine works on, and how many of them have no token yet."""

from __future__ import annotations

import asyncio

from folovllm.server.stream import Stream


class OpenRequests:
    """The streams of the requests that are not over, found by their number or by their id.

    Invariant: a request counts as queued from `add` to its first token (`leave_queue`) or its end (`remove`).
    """

    def __init__(self) -> None:
        self._by_number: dict[int, Stream] = {}
        self._by_id: dict[str, Stream] = {}
        self.num_queued = self.num_queued_tokens = 0  # requests, and the tokens of their prompts
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
        self.num_queued += 1
        self.num_queued_tokens += stream.state.metrics.num_prompt_tokens
        self.is_empty.clear()

    def leave_queue(self, stream: Stream) -> None:
        """Its first token is here."""
        self.num_queued -= 1
        self.num_queued_tokens -= stream.state.metrics.num_prompt_tokens

    def remove(self, stream: Stream) -> None:
        """The engine works on it no more."""
        del self._by_number[stream.number], self._by_id[stream.request_id]
        if not stream.has_begun:
            self.leave_queue(stream)
        if not self._by_number:
            self.is_empty.set()
