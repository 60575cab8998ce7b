"""One streamed request to an OpenAI-compatible server, and when its pieces came."""

from __future__ import annotations

import asyncio
import ssl
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any
from urllib.parse import urlsplit

import httptools
import msgspec

from folovllm.bench.workload import BenchRequest


@dataclass(slots=True)
class Reply:
    """What a client saw of one answer; times are the event loop's seconds."""

    begin: float
    times: list[float] = field(default_factory=list)  # at which a piece of text came
    num_tokens: int = 0  # by the server's own count
    error: str | None = None  # why there is no whole answer
    is_over: bool = False

    @property
    def ttft(self) -> float:
        """Seconds to the first piece."""
        return self.times[0] - self.begin

    @property
    def tpot(self) -> float:
        """Mean seconds a token, after the first piece."""
        return (self.times[-1] - self.times[0]) / max(1, self.num_tokens - 1)

    @property
    def gaps(self) -> list[float]:
        """Seconds between pieces: what a reader sees, however many tokens one has."""
        return [after - before for before, after in pairwise(self.times)]


class Told(msgspec.Struct):
    """An event of the stream, as far as it matters here."""

    choices: list[msgspec.Raw] = []
    usage: dict[str, Any] | None = None
    error: Any = None


read_event = msgspec.json.Decoder(Told).decode


class Client(asyncio.Protocol):
    """Reads one streamed response. Only the times are looked at closely: a client must not be what is measured."""

    def __init__(self, reply: Reply) -> None:
        self._reply = reply
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpResponseParser(self)
        self._unread = b""
        self.over: asyncio.Future[None] = self._loop.create_future()

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserCallbackError) as error:
            self._end(f"the server's response cannot be read: {error.__context__ or error}")

    def connection_lost(self, exc: Exception | None) -> None:
        self._end("the server closed the connection before the answer was over")

    def on_body(self, body: bytes) -> None:
        """A part of the body, without HTTP's own lines. An error's body is no stream of events."""
        self._unread += body
        if self._parser.get_status_code() != 200:
            return
        *events, self._unread = self._unread.split(b"\n\n")
        now = self._loop.time()
        for event in events:
            if event.startswith(b"data: {"):
                self._take(read_event(event[6:]), now)
            elif event == b"data: [DONE]":
                self._end(None)

    def on_message_complete(self) -> None:
        """All is here."""
        status = self._parser.get_status_code()
        said = self._unread.decode(errors="replace")[:300]
        self._end("the stream ended without [DONE]" if status == 200 else f"status {status}: {said}")

    def _take(self, told: Told, now: float) -> None:
        if told.choices:
            self._reply.times.append(now)
        if told.usage is not None:
            self._reply.num_tokens = told.usage["completion_tokens"]
        if told.error is not None:
            self._end(msgspec.json.encode(told.error).decode())

    def _end(self, error: str | None) -> None:
        if not self.over.done():
            self._reply.error, self._reply.is_over = error, True
            self.over.set_result(None)


class Server:
    """An address that answers `/v1/completions`."""

    def __init__(self, url: str, model: str, api_key: str | None = None) -> None:
        """Raises ValueError for an address that is none."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is no address of a server: write http://127.0.0.1:8000")
        self._host, self._tls = parts.hostname, ssl.create_default_context() if parts.scheme == "https" else None
        self._port = parts.port or (443 if self._tls else 80)
        path = parts.path.rstrip("/").removesuffix("/v1") + "/v1"
        self._head = f"POST {path}/completions HTTP/1.1\r\nHost: {parts.netloc}\r\n"
        self._head += f"Authorization: Bearer {api_key}\r\n" * bool(api_key)
        self._model = model

    async def ask(self, request: BenchRequest, temperature: float, replies: list[Reply]) -> Reply:
        """Send a request and wait for the end of its answer; the reply is in `replies` as soon as it is asked for."""
        reply = Reply(asyncio.get_running_loop().time())
        replies.append(reply)
        try:
            transport, client = await asyncio.get_running_loop().create_connection(
                lambda: Client(reply), self._host, self._port, ssl=self._tls
            )
        except OSError as error:
            reply.error, reply.is_over = f"cannot reach {self._host}:{self._port}: {error.strerror or error}", True
            return reply
        try:
            transport.write(self._wire(request, temperature))
            await client.over
        finally:
            transport.abort()
        return reply

    def _wire(self, request: BenchRequest, temperature: float) -> bytes:
        fields = {
            "model": self._model, "prompt": request.prompt, "max_tokens": request.output_len, "ignore_eos": True,
            "temperature": temperature, "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        body = msgspec.json.encode(fields)
        rest = f"Content-Type: application/json\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
        return (self._head + rest).encode() + body
