"""From streams of the engine to one HTTP response: whole, or as events."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from starlette.responses import Response
from starlette.types import Receive

from folovllm.outputs import CompletionOutput, RequestOutput
from folovllm.server.answers import DONE, CompletionWriter, event
from folovllm.server.async_engine import EngineDead
from folovllm.server.errors import as_api_error
from folovllm.server.protocol import StreamOptions, Usage
from folovllm.server.sse import EventStream, merge, unless_gone
from folovllm.server.stream import Stream


class Job:
    """One HTTP request: a stream for each of its prompts, each with `n` answers. Whoever makes one closes it."""

    def __init__(self, streams: Sequence[Stream], writer: CompletionWriter, n: int) -> None:
        self._streams, self._writer, self._n = streams, writer, n
        self._latest: dict[int, RequestOutput] = {}

    def close(self) -> None:
        """End what still runs of it; twice is once."""
        for stream in self._streams:
            stream.close()

    async def whole(self, receive: Receive) -> Response:
        """The response when all is answered. Raises ClientDisconnect once nobody waits for it any more."""
        try:
            await unless_gone(receive, self._read_all())
        finally:
            self.close()
        answers = [pair for i, output in sorted(self._latest.items()) for pair in self._numbered(i, output)]
        return Response(self._writer.whole(answers, self._usage()), media_type="application/json")

    def events(self, options: StreamOptions) -> EventStream:
        """The response that begins now."""
        return EventStream(self._events(options), self.close)

    async def _read_all(self) -> None:
        async for i, output in self._outputs():
            self._latest[i] = output
            self._writer.hear(i, output)

    async def _events(self, options: StreamOptions) -> AsyncIterator[bytes]:
        """What is new, step by step; an error is the last that is said."""
        try:
            async for i, output in self._outputs():
                self._latest[i] = output
                self._writer.hear(i, output)
                usage = self._usage() if options.continuous_usage_stats else None
                if chunks := self._writer.chunks(self._numbered(i, output), usage):
                    yield chunks
            if options.include_usage:
                yield self._writer.last(self._usage())
        except (EngineDead, ValueError) as error:
            yield event(as_api_error(error).body())
        yield DONE

    def _outputs(self) -> AsyncIterator[tuple[int, RequestOutput]]:
        return merge(list(self._streams)) if len(self._streams) > 1 else self._of_one()

    async def _of_one(self) -> AsyncIterator[tuple[int, RequestOutput]]:
        async for output in self._streams[0]:
            yield 0, output

    def _numbered(self, i: int, output: RequestOutput) -> list[tuple[int, CompletionOutput]]:
        """The answers to prompt `i`, by their number in the response."""
        return [(i * self._n + answer.index, answer) for answer in output.outputs]

    def _usage(self) -> Usage:
        return self._writer.usage(self._latest.values())
