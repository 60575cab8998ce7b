"""The addresses of the inspector: the page, its files, and the stream of a running engine."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from folovllm.inspector.page import STATIC, served_page
from folovllm.server.errors import ApiError

PAGE, FILES = "/inspector", "/inspector/static/{name}"
PREFIX = "inspector/static/"  # of the files, as the page says it
TYPES = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
SAFE = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
    "connect-src 'self'; img-src 'self' data: blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'self'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


class HostCheck:
    """Knows by which names this machine may be asked.

    A page from elsewhere can let its own name point here and then ask as if it were ours (DNS rebinding); the Host
    header still has that name. An address in numbers is no name.
    """

    def __init__(self, names: Iterable[str], flag: str) -> None:
        """`flag` is what adds a name."""
        self._flag = flag
        self._names = {"localhost", socket.gethostname().lower(), *(name.lower() for name in names)}

    def check(self, request: Request) -> None:
        """Raise ApiError (403) unless the request came by one of the names, and from a page of ours if from any."""
        host = request.headers.get("host", "")
        name = host_name(host)
        if name not in self._names and not is_address(name):
            message = f"this server was asked as {name!r}, which it does not know: use localhost, or start it with {self._flag} {name}"
            raise ApiError(403, message, code="unknown_host")
        origin = request.headers.get("origin")
        if origin is not None and origin.partition("://")[2] != host:
            raise ApiError(403, f"a page of {origin} may not ask here", code="other_origin")


def host_name(host: str) -> str:
    """The name in a Host header, without its port."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower()


def is_address(name: str) -> bool:
    """Whether it is an address in numbers."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def page_response(source: dict[str, Any]) -> Response:
    """The page."""
    return Response(served_page(source, PREFIX), media_type="text/html", headers=SAFE)


def file_response(name: str) -> Response:
    """One of the page's files. Raises ApiError (404) for anything else."""
    file = STATIC / name
    if name not in {file.name for file in STATIC.iterdir()} or file.suffix not in TYPES:
        raise ApiError(404, f"{name}: not found")
    return Response(file.read_bytes(), media_type=TYPES[file.suffix], headers=SAFE)
