"""What one connection may cost: time and bytes until it says what it wants."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from http import HTTPStatus

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from folovllm.electives.server.errors import ApiError

HEADER_SECONDS = 20.0
LONGEST_HEAD = 1 << 16  # bytes
LAST_SECONDS = 5.0  # that a refused client has to read why


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's protocol, but a head must end HEADER_SECONDS after the connection was made, or the last answer was complete.

    Bytes that come do not extend the time. At most LONGEST_HEAD bytes may come until a head ends, and until the next byte of a
    body comes, which bounds the extensions of chunks and the trailers. A second request before the answer to the first closes
    the connection.
    """

    _deadline: asyncio.TimerHandle | None = None
    _num_idle = 0  # bytes since a head ended or a body grew
    _is_refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._close_after(HEADER_SECONDS)

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

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a header. A trailer, which comes when the request is at work, is dropped."""
        if self._deadline is not None:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Start the request. Raises ValueError, which refuses it, if the one before is not answered yet."""
        if self.cycle is not None and not self.cycle.response_complete:
            raise ValueError("a request before the answer to the last one")
        self._num_idle = 0
        self._keep_open()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._num_idle = 0
        super().on_body(body)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._close_after(HEADER_SECONDS)

    def connection_lost(self, exc: Exception | None) -> None:
        self._keep_open()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, "this is no request in HTTP/1.1 (nor is there TLS here: the address begins with http://)")

    def _refuse(self, status: int, message: str) -> None:
        """Say why, and read no more. A request that has come whole is not answered: the refusal would be taken for its answer."""
        self._is_refused = True
        if (cycle := self.cycle) is not None and not cycle.response_complete:
            if cycle.response_started or not cycle.more_body:
                self.transport.abort()
                return
            cycle.disconnected = True
            cycle.message_event.set()
        body = ApiError(status, message).body()
        head = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        with suppress(OSError, RuntimeError):  # the client has gone meanwhile
            self.transport.write(f"{head}Connection: close\r\n\r\n".encode() + body)
            self.transport.write_eof()
        self._close_after(LAST_SECONDS)

    def _close_after(self, seconds: float) -> None:
        self._keep_open()
        self._deadline = self.loop.call_later(seconds, self.transport.close)

    def _keep_open(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
