"""The socket of a server, what the head of a request may cost, and the signals that end it.

Nothing of the engine is imported here: a page can be there before it.
"""

from __future__ import annotations

import asyncio
import signal
import socket
from contextlib import nullcontext
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from folovllm.electives.server.errors import ApiError

HEADER_SECONDS = 20.0
LONGEST_HEAD = 1 << 16  # bytes
LAST_SECONDS = 5.0  # that a refused client has to read why


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's protocol, in which a head has at most LONGEST_HEAD bytes and ends within HEADER_SECONDS.

    The time begins with the connection, or with the last answer. As many bytes may come between two pieces of a body.
    """

    _room = LONGEST_HEAD  # bytes that may come before a head ends or a body grows
    _is_refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._deadline = self.loop.call_later(HEADER_SECONDS, transport.close)

    def data_received(self, data: bytes) -> None:
        """Parse what came, no more at once than there is room for. After a refusal it is dropped."""
        while data and not self._is_refused:
            piece, data = data[: self._room], data[self._room :]
            self._room -= len(piece)
            super().data_received(piece)
            if not self._room:
                self._refuse(431, f"the head of a request has at most {LONGEST_HEAD} bytes, with all its headers")

    def on_headers_complete(self) -> None:
        """Start the request. An error refuses it."""
        if self.cycle is not None and not self.cycle.response_complete:
            raise ValueError("a request before the answer to the last one")
        self._room = LONGEST_HEAD
        self._deadline.cancel()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._room = LONGEST_HEAD
        super().on_body(body)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._deadline = self.loop.call_later(HEADER_SECONDS, self.transport.close)

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, "this is no request in HTTP/1.1 (nor is there TLS here: the address begins with http://)")

    def _refuse(self, status: int, message: str) -> None:
        """Say why, and close. A request that is at work ends without an answer."""
        if self._is_refused:
            return
        self._is_refused = True
        if self.cycle is not None and not self.cycle.response_complete:
            self.transport.abort()
            return
        body = ApiError(status, message).body()
        head = f"HTTP/1.1 {status} Refused\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        self.transport.write(f"{head}Connection: close\r\n\r\n".encode() + body)
        self.loop.call_later(LAST_SECONDS, self.transport.close)


def make_server(app: ASGIApp, **options: Any) -> uvicorn.Server:
    """uvicorn's server for HTTP/1.1 within our bounds; `options` are those of `uvicorn.Config`. Its caller takes care of signals."""
    chosen: dict[str, Any] = {"log_level": "warning", "access_log": False, **options}
    server = uvicorn.Server(uvicorn.Config(app, http=BoundedProtocol, ws="none", lifespan="off", **chosen))
    server.capture_signals = nullcontext  # type: ignore[method-assign, assignment]
    return server


def listen(host: str, port: int) -> socket.socket:
    """A socket at the address, before the model is loaded. Raises ValueError where it is not available."""
    if not host:
        raise ValueError("--host is empty: name an address of this machine; 0.0.0.0 is all of them")
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ValueError(
            f"cannot listen at {host}:{port} ({error.strerror}): choose another --port or --host"
        ) from error
    return listener


def address_of(listener: socket.socket) -> str:
    """Where it listens, as a browser writes it."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def ending_signals() -> list[signal.Signals]:
    """The signals that end a server. SIGINT is not among them where whoever started it had it ignored, as a script's `&` does."""
    is_ignored = signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    return [signal.SIGTERM] if is_ignored else [signal.SIGTERM, signal.SIGINT]
