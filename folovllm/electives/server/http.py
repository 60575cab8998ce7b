"""Who may ask, and bodies of requests and responses: for every application of ours."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable
from typing import Any

import msgspec
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from folovllm.electives.server.errors import ApiError

CLIENT_GONE = 499  # the status of a response that has no reader
DROPPED = 64 << 20  # bytes of too long a body that are read all the same


def require_json(request: Request) -> None:
    """Raise ApiError unless the headers say that the body is JSON as it stands (415), and of a request in HTTP/1.1 (426)."""
    if "upgrade" in request.headers:  # the parser takes the body for the other protocol
        message = "this server has HTTP/1.1 alone: send no Upgrade header (curl: --http1.1, Java: HttpClient.Version.HTTP_1_1)"
        raise ApiError(426, message, headers={"Connection": "close", "Upgrade": "HTTP/1.1"})
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise ApiError(415, "the body must be JSON: send the header Content-Type: application/json")
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise ApiError(415, "the body must be JSON as it stands: send it without Content-Encoding")


async def read_body(request: Request, limit: int) -> bytes:
    """The body. Raises ApiError (413) if it is longer than limit, in bytes.

    Up to DROPPED bytes too many are read and dropped first: most clients read no answer before they have sent all.
    """
    body, size = bytearray(), 0
    async for piece in request.stream():
        size += len(piece)
        if size <= limit:
            body += piece
        elif size > limit + DROPPED:
            break
    if size > limit:
        message = f"the body is longer than {limit} bytes: send less, or start the server with --max-body-size"
        raise ApiError(413, message, headers={"Connection": "close"})
    return bytes(body)


def json_response(content: Any) -> Response:
    """A response with status 200."""
    return Response(msgspec.json.encode(content), media_type="application/json")


def error_response(error: ApiError) -> Response:
    """The response that tells an error."""
    return Response(error.body(), error.status, error.headers, media_type="application/json")


class HostGuard:
    """Middleware that refuses requests by a name that is not known, and requests of pages from elsewhere.

    A page from elsewhere can let its own name point here and then ask as if it were ours (DNS rebinding); the Host
    header, which every browser sends, still has that name. An address in numbers is no name.

    Args:
        app: the application behind it.
        names: by which this server may be asked, beside localhost and the machine's own; "*" is any.
        flag: what adds a name.
        origins: whose pages may ask, beside the server's own, as --cors-origin has it; "*" is any. None if there is no such flag.
    """

    def __init__(self, app: ASGIApp, names: Iterable[str], flag: str, origins: Iterable[str] | None = None) -> None:
        self._app, self._flag = app, flag
        self._names = {"localhost", socket.gethostname().lower(), *(name.lower() for name in names)}
        self._origins = {origin.lower() for origin in origins or ()}
        self._hint = "" if origins is None else ": start the server with --cors-origin {0} to let it"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer 403, or let it pass."""
        app = self._app
        if scope["type"] == "http" and (refusal := self._refusal(Headers(scope=scope))) is not None:
            app = error_response(refusal)
        await app(scope, receive, send)

    def _refusal(self, headers: Headers) -> ApiError | None:
        host = ",".join(headers.getlist("host")).lower()
        name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
        if "host" in headers and self._names.isdisjoint((name, "*")) and not is_address(name):
            instead = f"use localhost or an address in numbers, or start it with {self._flag} {name}"
            return ApiError(403, f"this server does not know the name {name!r}: {instead}", code="unknown_host")
        origin = headers.get("origin", "").lower()
        if origin and origin.partition("://")[2] != host and self._origins.isdisjoint((origin, "*")):
            return ApiError(403, f"a page of {{0}} may not ask here{self._hint}".format(origin), code="other_origin")
        return None


def is_address(name: str) -> bool:
    """Whether it is an address in numbers."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
