"""Bodies of requests and responses, for every application of ours."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

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
