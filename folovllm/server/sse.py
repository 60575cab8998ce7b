"""Responses, whole or as server-sent events. They end when the client leaves: the work for it races against its disconnect."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from folovllm.engine.output_processor import OutputDelta
from folovllm.request import Sequence
from folovllm.server.async_engine import AsyncEngine
from folovllm.server.errors import as_api_error
from folovllm.server.protocol import StreamOptions
from folovllm.server.replies import DONE, CompletionWriter, event
from folovllm.server.stream import OutputCollector, Stream

T = TypeVar("T")


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Do the work, or cancel it as soon as the client is gone. The request's body must have been read.

    `_disconnect(receive)` returns when the client is gone. Work that is done by then is done. However the race ends, and also
    if it is cancelled itself, nothing of it still runs afterwards: neither the work, which may take a while to give back what
    it holds, nor the wait for the client.

    Returns:
        What the work returns; what it raises is raised.

    Raises:
        ClientDisconnect: the client was gone first.
    """
    doing = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait((doing, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not doing.done():
            raise ClientDisconnect
        return doing.result()
    finally:
        doing.cancel()
        leaving.cancel()
        await asyncio.wait((doing, leaving))  # what the work holds is given back by now


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events. A client that reads slowly holds up this response: `send` waits until the socket takes more."""

    HEADERS = ((b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache"))

    def __init__(self, events: AsyncIterator[bytes], close: Callable[[], None]) -> None:
        self._events, self._close = events, close
        self.background = None
        self.status_code = 200

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_gone(receive, self._send(send, with_body=scope["method"] != "HEAD"))
        except ClientDisconnect:
            return
        finally:
            self._close()  # here too, for a generator that was never begun ends nothing

    async def _send(self, send: Send, with_body: bool) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": list(self.HEADERS)})
        if with_body:
            async for event in self._events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class ResponseHandler:
    """One HTTP request: a stream for each of its prompts, each with `n` answers.

    Its maker calls `whole` or `events`, once: each closes the streams at its end.
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

    async def whole(self, receive: Receive) -> Response:
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
        return Response(self._writer.whole(answers), media_type="application/json")

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
