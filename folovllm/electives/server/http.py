"""Who may ask, bodies of requests, and errors as responses: for every application of ours."""

from __future__ import annotations

import logging
import re
import socket
from collections.abc import Iterable
from typing import Any

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from folovllm.electives.server import protocol
from folovllm.electives.server.errors import ApiError, EngineDead, Unavailable

logger = logging.getLogger("folovllm")
CLIENT_GONE = 499  # the status of a response that has no reader
ADDRESS = re.compile(r"[\d.]+(:\d+)?|\[.*")  # a Host in numbers: it is no name
FIELDS = (*protocol.CompletionRequest.__struct_fields__, *protocol.ChatRequest.__struct_fields__)


async def read_json(request: Request, limit: int) -> bytes:
    """The body, which must be JSON: a web page may send other types to any server, unasked.

    Raises ApiError unless the headers say that it is JSON (415), of a request in HTTP/1.1 (426).
    """
    if "upgrade" in request.headers:  # the parser takes the body for the other protocol
        message = "this server has HTTP/1.1 alone: send no Upgrade header (curl: --http1.1, Java: HttpClient.Version.HTTP_1_1)"
        raise ApiError(426, message, headers={"Connection": "close", "Upgrade": "HTTP/1.1"})
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise ApiError(415, "the body must be JSON: send the header Content-Type: application/json")
    return await read_body(request, limit)


async def read_body(request: Request, limit: int) -> bytes:
    """The body. Raises ApiError (413) if it is longer than `limit` bytes; uvicorn drops the rest of it, so that its sender can read this."""
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > limit:
            message = f"the body is longer than {limit} bytes: send less, or start the server with --max-body-size"
            raise ApiError(413, message)
    return bytes(body)


def as_api_error(error: Exception) -> ApiError:
    """What a client is told of an error: a ValueError is the client's fault, and what nobody expected is logged."""
    match error:
        case ApiError():
            return error
        case Unavailable():
            return ApiError(503, str(error), code="unavailable")
        case EngineDead():
            return ApiError(500, f"the engine has ended: {error}", code="engine_dead")
        case ValueError():
            first = str(error).partition(" ")[0]
            return ApiError(400, str(error), param=first if first in FIELDS else None)
    logger.error("a request failed", exc_info=error)
    return ApiError(500, "the server failed at this request, and its log says how")


async def on_error(request: Request, error: Exception) -> Response:
    """The response to an error: Starlette's own (an unknown address, another method), a refusal, or a bug."""
    if isinstance(error, ClientDisconnect):
        return Response(status_code=CLIENT_GONE)
    if isinstance(error, HTTPException):
        message = f"{request.method} {request.url.path}: {error.detail}"
        error = ApiError(error.status_code, message, headers=dict(error.headers or {}))
    return error_response(as_api_error(error))


HANDLERS: dict[Any, Any] = dict.fromkeys(
    (ClientDisconnect, HTTPException, ApiError, ValueError, RuntimeError, Exception), on_error
)


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
        origins: whose pages may ask, beside the server's own, as --cors-origin has it; "*" is any.
    """

    def __init__(self, app: ASGIApp, names: Iterable[str], flag: str, origins: Iterable[str] = ()) -> None:
        self._app, self._flag, self._origins = app, flag, {*origins}
        self._names = {"localhost", socket.gethostname().lower(), *(name.lower() for name in names)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer 403, or let it pass."""
        refusal = self._refusal(Headers(scope=scope)) if scope["type"] == "http" else None
        await (self._app if refusal is None else error_response(refusal))(scope, receive, send)

    def _refusal(self, headers: Headers) -> ApiError | None:
        host, origin = ",".join(headers.getlist("host")).lower(), headers.get("origin", "").lower()
        name = host.partition(":")[0]
        if "host" in headers and not ADDRESS.fullmatch(host) and self._names.isdisjoint((name, "*")):
            instead = f"use localhost or an address in numbers, or start it with {self._flag} {name}"
            return ApiError(403, f"this server does not know the name {name!r}: {instead}", code="unknown_host")
        if origin and origin.partition("://")[2] != host and self._origins.isdisjoint((origin, "*")):
            message = f"a page of {origin} may not ask here: a server lets it with --cors-origin {origin}"
            return ApiError(403, message, code="other_origin")
        return None
