"""The socket of a server, and the signals that end it. Nothing of the engine is imported here: a page can be there before it."""

from __future__ import annotations

import signal
import socket
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from folovllm.electives.server.http_protocol import BoundedProtocol


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
