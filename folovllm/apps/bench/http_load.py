"""One streamed request to an OpenAI-compatible server, and when its pieces came."""

from __future__ import annotations

import asyncio
import ssl
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any
from urllib.parse import urlsplit

import msgspec

from folovllm.apps.bench.workload import BenchRequest

LONGEST_LINE = 1 << 20  # bytes


@dataclass(slots=True)
class Reply:
    """What a client saw of one answer; times are the event loop's seconds."""

    begin: float
    times: list[float] = field(default_factory=list)  # at which a piece of text came
    num_tokens: int = 0  # by the server's own count
    error: str | None = None  # why there is no whole answer

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


class Event(msgspec.Struct):
    """An event of the stream, as far as it matters here."""

    choices: list[msgspec.Raw] = []
    usage: dict[str, Any] | None = None  # the server's count of tokens
    error: Any = None


read_event = msgspec.json.Decoder(Event).decode


async def read_reply(stream: asyncio.StreamReader, reply: Reply) -> str | None:
    """Read a streamed response into `reply`, line by line; returns what is wrong with it. HTTP's own lines are passed over."""
    status = await stream.readline()
    if not status.startswith(b"HTTP/1.1 200"):
        body = (status + await stream.read()).partition(b"\r\n\r\n")[2].decode(errors="replace")
        return f"{status.decode(errors='replace').strip()}: {body[:300]}"
    while line := await stream.readline():
        if line.startswith(b"data: {"):
            event, now = read_event(line[6:]), asyncio.get_running_loop().time()
            if event.choices:
                reply.times.append(now)
            if event.usage is not None:
                reply.num_tokens = event.usage["completion_tokens"]
            if event.error is not None:
                return str(event.error)
        elif line.startswith(b"data: [DONE]"):
            return None
    return "the stream ended without [DONE]"


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
            stream, writer = await asyncio.open_connection(self._host, self._port, ssl=self._tls, limit=LONGEST_LINE)
            try:
                writer.write(self._wire(request, temperature))
                reply.error = await read_reply(stream, reply)
            finally:
                writer.transport.abort()
        except OSError as error:
            reply.error = f"cannot reach {self._host}:{self._port}: {error.strerror or error}"
        except (ValueError, KeyError, msgspec.MsgspecError) as error:
            reply.error = f"the server's response cannot be read: {error}"
        return reply

    def _wire(self, request: BenchRequest, temperature: float) -> bytes:
        fields = {
            "model": self._model, "prompt": request.prompt, "max_tokens": request.output_len, "ignore_eos": True,
            "temperature": temperature, "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        body = msgspec.json.encode(fields)
        rest = f"Content-Type: application/json\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
        return (self._head + rest).encode() + body
