"""The socket of a server, what a connection may cost, and the signals that end it.

Nothing of the engine is imported here: a page can be there before it.
"""

from __future__ import annotations

import asyncio
import signal
import socket
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from folovllm.electives.server.errors import ApiError

HEADER_SECONDS = 20.0
LONGEST_HEAD = 1 << 16  # bytes
LAST_SECONDS = 5.0  # that a refused client has to read why


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's protocol with bounds.

    A head ends HEADER_SECONDS after the connection was made, or after the last answer, and has at most LONGEST_HEAD bytes.
    As many bytes may come between two pieces of a body. A request before the answer to the last one ends the connection.
    """

    _deadline: asyncio.TimerHandle | None = None
    _num_idle = 0  # bytes since a head ended or a body grew
    _is_refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._close_after(HEADER_SECONDS)

    def data_received(self, data: bytes) -> None:
        """Parse what came, in pieces of which none is longer than what may still come. After a refusal it is dropped."""
        while data and not self._is_refused:
            room = LONGEST_HEAD - self._num_idle
            piece, data = data[:room], data[room:]
            self._num_idle += len(piece)
            super().data_received(piece)
            if self._num_idle >= LONGEST_HEAD and not self._is_refused:
                self._refuse(431, f"the head of a request has at most {LONGEST_HEAD} bytes, with all its headers")

    def on_headers_complete(self) -> None:
        """Start the request. A ValueError refuses it."""
        if self.cycle is not None and not self.cycle.response_complete:
            raise ValueError("a request before the answer to the last one")
        self._num_idle = 0
        self._close_after(None)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._num_idle = 0
        super().on_body(body)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._close_after(HEADER_SECONDS)

    def connection_lost(self, exc: Exception | None) -> None:
        self._close_after(None)
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, "this is no request in HTTP/1.1 (nor is there TLS here: the address begins with http://)")

    def _refuse(self, status: int, message: str) -> None:
        """Say why, and close. A request that is at work ends without an answer."""
        self._is_refused = True
        if self.cycle is not None and not self.cycle.response_complete:
            self.transport.abort()
            return
        body = ApiError(status, message).body()
        head = f"HTTP/1.1 {status} Refused\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        self.transport.write(f"{head}Connection: close\r\n\r\n".encode() + body)
        self._close_after(LAST_SECONDS)

    def _close_after(self, seconds: float | None) -> None:
        """Close the connection after so many seconds from now on; None: do not."""
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = None if seconds is None else self.loop.call_later(seconds, self.transport.close)


class Server(uvicorn.Server):
    """uvicorn's server for HTTP/1.1 within our bounds. Its maker takes care of signals."""

    def __init__(self, app: ASGIApp, **options: Any) -> None:
        """`options` are those of `uvicorn.Config`."""
        chosen: dict[str, Any] = {"log_level": "warning", "access_log": False, **options}
        super().__init__(uvicorn.Config(app, http=BoundedProtocol, ws="none", lifespan="off", **chosen))

    def capture_signals(self) -> AbstractContextManager[None]:  # type: ignore[override]
        """Capture none."""
        return nullcontext()


def listen(host: str, port: int) -> socket.socket:
    """A socket at the address, before the model is loaded. Raises ValueError where it is not available."""
    if not host:
        raise ValueError("--host is empty: name an address of this machine; 0.0.0.0 is all of them")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ValueError(
            f"cannot listen at {host}:{port} ({error.strerror}): choose another --port or --host"
        ) from error
    return listener


def ending_signals() -> list[signal.Signals]:
    """The signals that end a server. SIGINT is not among them where whoever started it had it ignored, as a script's `&` does."""
    is_ignored = signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    return [signal.SIGTERM] if is_ignored else [signal.SIGTERM, signal.SIGINT]
