"""The response to a request: its answers whole, or as server-sent events."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable
from typing import Any, ClassVar, Generic, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive

from folovllm.electives.server import replies
from folovllm.electives.server.async_engine import AsyncEngine
from folovllm.electives.server.http import as_api_error
from folovllm.electives.server.protocol import ChatRequest, CompletionRequest, Sampling, StreamOptions
from folovllm.electives.server.replies import Json, MessageReader
from folovllm.electives.server.sse import EventStream, unless_gone
from folovllm.electives.server.stream import OutputCollector, OutputDelta, Stream
from folovllm.request import Sequence

DONE = b"data: [DONE]\n\n"
MARK = "\0"  # in place of the text while a frame is made
R = TypeVar("R", bound=Sampling)


def event(payload: bytes) -> bytes:
    """JSON as a server-sent event."""
    return b"data: " + payload + b"\n\n"


class ResponseHandler(ABC, Generic[R]):
    """One HTTP request: a stream for each of its prompts, each with `n` answers. `index` counts the answers of all of them.

    Its maker calls `full` or `events`, once: each closes the streams at its end.
    """

    ID: ClassVar[str]  # how an id begins
    OBJECT: ClassVar[str]
    CHUNK: ClassVar[str]  # the object in a stream
    has_frames = True  # False where an answer's events differ by more than their text

    def __init__(self, engine: AsyncEngine, asked: R, model: str, requests: list[list[Sequence]]) -> None:
        """Submit the requests. `asked` is what they were made of, `model` the name that the response shows."""
        self._engine, self._asked, self._is_stream = engine, asked, bool(asked.stream)
        self._collector, self._streams = OutputCollector(), list[Stream]()
        try:
            for seqs in requests:
                self._streams.append(engine.submit(seqs, collector=self._collector))
        except BaseException:  # nobody would close those before
            self.close()
            raise
        self._n, self._num_open = len(requests[0]), len(requests)
        self._first_index = {stream.number: i * self._n for i, stream in enumerate(self._streams)}
        kind = self.CHUNK if asked.stream else self.OBJECT
        self._head: Json = {"id": f"{self.ID}-{uuid.uuid4().hex}", "object": kind, "created": int(time.time())}
        self._head["model"] = model
        self._starts: dict[int, int] = {}  # by answer of which something was shown: characters that are shown before it
        self._frames: dict[int, tuple[bytes, bytes]] = {}  # by answer: its events' bytes before and after the text

    def close(self) -> None:
        """End what still runs. A second call does nothing."""
        for stream in self._streams:
            stream.close()

    @abstractmethod
    def choice(self, index: int, answer: OutputDelta) -> Json | None:
        """How a response shows the answer, or what is new in it. None: not at all."""

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
        choices = [self.choice(index, answer) for index, answer in answers]
        return Response(self._json(choices, self._usage()), media_type="application/json")

    def events(self) -> EventStream:
        """The response as a stream of events."""
        return EventStream(self._events(), self.close)

    async def _events(self) -> AsyncIterator[bytes]:
        """What is new, step by step; an error is the last event but one."""
        options = self._asked.stream_options or StreamOptions()
        try:
            while self._num_open:
                pieces = await self._next()
                usage = self._usage() if options.continuous_usage_stats else None
                if events := b"".join([self._event(index, piece, usage) for index, piece in pieces]):
                    yield events
            if options.include_usage:
                yield event(self._json([], self._usage()))
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

    def _event(self, index: int, answer: OutputDelta, usage: Json | None) -> bytes:
        """The event of a piece with text, log-probabilities or a finish reason: half a character alone gives none.

        The first time it keeps the event's frame, into which later texts are put.
        """
        if not (answer.text or answer.logprobs or answer.finish_reason):
            return b""
        is_text_alone = usage is None and answer.logprobs is None and answer.finish_reason is None
        if is_text_alone and (frame := self._frames.get(index)) is not None:
            return frame[0] + msgspec.json.encode(answer.text) + frame[1]
        choice = self.choice(index, answer)
        if is_text_alone and self.has_frames:
            marked = self.choice(index, OutputDelta(index, MARK, None, None, None))
            before, _, after = event(self._json([marked], None)).rpartition(msgspec.json.encode(MARK))
            self._frames[index] = before, after
        return b"" if choice is None else event(self._json([choice], usage))

    def _json(self, choices: list[Json | None], usage: Json | None) -> bytes:
        """A response, or a chunk of a stream."""
        return msgspec.json.encode(self._head | {"choices": choices} | ({"usage": usage} if usage else {}))

    def _usage(self) -> Json:
        """Tokens, so far, of the requests that the response is made of."""
        prompt = sum(request.metrics.num_prompt_tokens for request in self._streams)
        generated = sum(request.metrics.num_generated_tokens for request in self._streams)
        cached = sum(request.seqs[0].num_cached_tokens for request in self._streams)
        usage = {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated}
        return usage | {"prompt_tokens_details": {"cached_tokens": cached}}


class CompletionHandler(ResponseHandler[CompletionRequest]):
    """A response of `/v1/completions`."""

    ID, OBJECT, CHUNK = "cmpl", "text_completion", "text_completion"

    def choice(self, index: int, answer: OutputDelta) -> Json:
        """The text, or what is new in it; with `echo` the first time behind the prompt, or the prompt alone."""
        request, asked, logprobs = self._streams[index // self._n], self._asked, None
        text, rows, offsets = "", list[replies.Row](), list[int]()
        if asked.echo and index not in self._starts:
            text, rows, offsets = replies.echoed(request, self._engine.tokenizer.decode, asked.logprobs)
        start = self._starts.setdefault(index, len(text))
        if asked.wants_prompt_alone:
            shown = None if answer.logprobs is None else list[replies.Row]()
            answer = OutputDelta(answer.answer, "", shown, answer.finish_reason and "length", None)
        if answer.logprobs is not None:
            ends = [*offsets, *(start + at for at in answer.offsets)]
            logprobs = replies.completion_logprobs([*rows, *answer.logprobs], ends)
            if rows:  # the first token of a prompt comes after nothing
                logprobs["token_logprobs"][0] = logprobs["top_logprobs"][0] = None
        choice = {"index": index, "text": text + answer.text, "logprobs": logprobs}
        if asked.prompt_logprobs is not None:
            choice["prompt_logprobs"] = replies.prompt_logprobs(request)
        return choice | {"finish_reason": answer.finish_reason, "stop_reason": answer.stop_reason}

    def _usage(self) -> Json:
        """An answer that nobody sees counts nothing."""
        usage = super()._usage()
        if self._asked.wants_prompt_alone:
            usage |= {"completion_tokens": 0, "total_tokens": usage["prompt_tokens"]}
        return usage


class ChatHandler(ResponseHandler[ChatRequest]):
    """A response of `/v1/chat/completions`. `make_reader` makes what reads the text of one answer."""

    ID, OBJECT, CHUNK = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, make_reader: Callable[[], MessageReader], *common: Any) -> None:
        super().__init__(*common)
        self._readers = [make_reader() for _ in range(self._n)]
        self.has_frames = make_reader is MessageReader

    def choice(self, index: int, answer: OutputDelta) -> Json | None:
        """The message, or what is new in it."""
        (message, reason), logprobs = self._readers[index].read(answer.text, answer.finish_reason), None
        if not self._is_stream:
            message = {"role": "assistant", "content": None if message else ""} | message
        elif not (message or reason or answer.logprobs):
            return None
        if answer.logprobs is not None:
            logprobs = replies.chat_logprobs(answer.logprobs, self._asked.top_logprobs or 0)
        choice = {"index": index, "delta" if self._is_stream else "message": message, "logprobs": logprobs}
        return choice | {"finish_reason": reason, "stop_reason": answer.stop_reason}

    def _event(self, index: int, answer: OutputDelta, usage: Json | None) -> bytes:
        """Before an answer's first event comes one with the role and no text, as OpenAI's: a client may look for text in others alone."""
        opening = b""
        if index not in self._starts:
            self._starts[index] = 0
            first = {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None}
            opening = event(self._json([first | {"finish_reason": None, "stop_reason": None}], usage))
        return opening + super()._event(index, answer, usage)

    def _json(self, choices: list[Json | None], usage: Json | None) -> bytes:
        if self._asked.prompt_logprobs is not None:  # then it is a whole response
            self._head["prompt_logprobs"] = replies.prompt_logprobs(self._streams[0])
        return super()._json(choices, usage)
