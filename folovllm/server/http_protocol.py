"""What one connection may cost: time and bytes until it says what it wants. And what it is owed once it has said all."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from http import HTTPStatus

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from folovllm.server.errors import ApiError

HEADER_SECONDS = 20.0
LONGEST_HEAD = 1 << 16  # bytes
MOST_PIPELINED = 16  # requests that wait for the answer to one before them
LAST_SECONDS = 5.0  # that a refused client has to read why
PROBES = (3.0, 4.0)  # seconds after a client's end of input: the second write fails if the first found nobody


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's protocol, but a connection is closed whose first request does not begin, or whose headers do not end, in time.

    Bytes that come do not extend the time, so a byte a second keeps no connection open. Answers may take as long as they need.
    At most LONGEST_HEAD bytes may come until a head ends, and until the next byte of a body comes, which bounds the extensions of
    chunks and the trailers. A client that has closed its sending side gets its answer.
    """

    _deadline: asyncio.TimerHandle | None = None
    _running: RequestResponseCycle | None = None  # the request that is being answered; `cycle` came last
    _num_idle = 0  # bytes since a head ended or a body grew
    _is_refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._begin()

    def data_received(self, data: bytes) -> None:
        """Parse what came, in pieces of which none is longer than what may still come."""
        rest = memoryview(data)
        while rest and not self._is_refused and not self.transport.is_closing():
            piece = rest[: LONGEST_HEAD - self._num_idle]
            rest = rest[len(piece) :]
            self._num_idle += len(piece)
            super().data_received(piece)  # type: ignore[arg-type]
            if self._num_idle >= LONGEST_HEAD and not self._is_refused:
                self._refuse(431, f"the head of a request has at most {LONGEST_HEAD} bytes, with all its headers")
        if self._deadline is None and self.cycle.response_complete:  # the rest of a refused body, or blank lines
            self._begin()

    def on_message_begin(self) -> None:
        """The first byte of a request is here."""
        self._begin()
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header. A trailer, which comes when the request is at work, is dropped."""
        if self._deadline is not None:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """It has said what it wants. Raises ValueError, which refuses it, behind too many others."""
        self._end()
        self._num_idle = 0
        if len(self.pipeline) >= MOST_PIPELINED:
            raise ValueError("too many requests in a pipeline")
        super().on_headers_complete()
        if not self.pipeline:
            self._running = self.cycle

    def on_body(self, body: bytes) -> None:
        self._num_idle = 0
        super().on_body(body)

    def on_response_complete(self) -> None:
        """It is answered: the next one's turn."""
        if self.pipeline:
            self._running = self.pipeline[-1][0]
        super().on_response_complete()

    def eof_received(self) -> bool:  # type: ignore[override]
        """The client will send no more. Returns whether the connection stays: while it is owed an answer.

        A client that has gone looks the same. But what it is sent comes back, and then the connection is lost.
        """
        if is_owed := self._last_answer():
            for seconds in PROBES:
                self.loop.call_later(seconds, self._probe)
        return is_owed

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell all requests that wait that their client is gone: uvicorn tells only the one that came last."""
        self._end()
        super().connection_lost(exc)
        self._disconnect()

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, "this is no request in HTTP/1.1 (nor is there TLS here: the address begins with http://)")

    def _probe(self) -> None:
        """Send what no reader of HTTP/1.1 takes for part of an answer: a zero before the size of the next chunk, or 100 Continue."""
        cycle = self._running
        if cycle is None or self.transport.is_closing() or self not in self.connections:
            return
        if cycle.scope["http_version"] == "1.1" and not cycle.response_started:
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        elif cycle.scope["http_version"] == "1.1" and cycle.chunked_encoding:
            self.transport.write(b"0")

    def _unanswered(self) -> list[RequestResponseCycle]:
        """The requests that have come, at least their heads, in their order."""
        cycles = [self._running, *(cycle for cycle, _ in reversed(self.pipeline))]
        return [cycle for cycle in cycles if cycle is not None and not cycle.response_complete]

    def _last_answer(self) -> bool:
        """Whether a whole request waits for its answer. If so, the connection ends after it."""
        owed = [cycle for cycle in self._unanswered() if not cycle.more_body]
        if owed:
            owed[-1].keep_alive = False
        return bool(owed)

    def _disconnect(self) -> None:
        for cycle in self._unanswered():
            cycle.disconnected = True
            cycle.message_event.set()

    def _refuse(self, status: int, message: str) -> None:
        """Take no more of this connection, and say why, unless that would be taken for the answer to the request before."""
        self._is_refused = True
        if self._last_answer():
            return
        self._disconnect()
        body = ApiError(status, message).body()
        head = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        with suppress(OSError, RuntimeError):  # the client has gone meanwhile
            self.transport.write(f"{head}Connection: close\r\n\r\n".encode() + body)
            self.transport.write_eof()
        self._end()
        self._deadline = self.loop.call_later(LAST_SECONDS, self.transport.close)

    def _begin(self) -> None:
        self._end()
        self._deadline = self.loop.call_later(HEADER_SECONDS, self._give_up)

    def _give_up(self) -> None:
        self._is_refused = True
        if not self._last_answer():
            self.transport.close()

    def _end(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
