"""The response to a request: its answers whole, or as server-sent events."""

from __future__ import annotations

from collections.abc import AsyncIterator

from starlette.responses import Response
from starlette.types import Receive

from folovllm.electives.server.async_engine import AsyncEngine
from folovllm.electives.server.http import as_api_error
from folovllm.electives.server.protocol import StreamOptions
from folovllm.electives.server.replies import DONE, CompletionWriter, event
from folovllm.electives.server.sse import EventStream, unless_gone
from folovllm.electives.server.stream import OutputCollector, OutputDelta, Stream
from folovllm.request import Sequence


class ResponseHandler:
    """One HTTP request: a stream for each of its prompts, each with `n` answers.

    Its maker calls `full` or `events`, once: each closes the streams at its end.
    """

    def __init__(self, engine: AsyncEngine, requests: list[list[Sequence]], writer: CompletionWriter, n: int) -> None:
        self._collector = OutputCollector()
        self._streams: list[Stream] = []
        try:
            for seqs in requests:
                self._streams.append(engine.submit(seqs, collector=self._collector))
        except BaseException:  # nobody would close those before
            self.close()
            raise
        self._first_index = {stream.number: i * n for i, stream in enumerate(self._streams)}
        self._num_open = len(self._streams)
        self._writer = writer
        writer.requests = self._streams

    def close(self) -> None:
        """End what still runs. A second call does nothing."""
        for stream in self._streams:
            stream.close()

    async def full(self, receive: Receive) -> Response:
        """The response when all is answered. Raises ClientDisconnect if the client leaves before."""

        async def read_all() -> list[tuple[int, OutputDelta]]:
            answers = list[tuple[int, OutputDelta]]()  # each stream has outputs once, at its end
            while self._num_open:
                answers += await self._next()
            return sorted(answers)

        try:
            answers = await unless_gone(receive, read_all())
        finally:
            self.close()
        return Response(self._writer.full(answers), media_type="application/json")

    def events(self, options: StreamOptions) -> EventStream:
        """The response as a stream of events."""
        return EventStream(self._events(options), self.close)

    async def _events(self, options: StreamOptions) -> AsyncIterator[bytes]:
        """What is new, step by step; an error is the last event but one."""
        try:
            while self._num_open:
                pieces = await self._next()
                usage = self._writer.usage() if options.continuous_usage_stats else None
                if chunks := self._writer.chunks(pieces, usage):
                    yield chunks
            if options.include_usage:
                yield self._writer.last()
        except Exception as error:
            yield event(as_api_error(error).body())
        yield DONE

    async def _next(self) -> list[tuple[int, OutputDelta]]:
        """Wait for outputs; returns what is new, by the number of the answer in the response."""
        answers = []
        for stream in await self._collector.get():
            first = self._first_index[stream.number]
            answers += [(first + piece.answer, piece) for piece in stream.take()]
            self._num_open -= stream.is_over
        return answers
