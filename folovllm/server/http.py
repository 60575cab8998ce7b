"""Bodies of requests and responses, for every application of ours."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from folovllm.server.errors import ApiError

CLIENT_GONE = 499  # the status of a response that has no reader


async def read_body(request: Request, limit: int) -> bytes:
    """The body. Raises ApiError (413) as soon as it is known to be too long."""
    body = bytearray()
    announced = request.headers.get("content-length", "0")
    too_long = int(announced) > limit if announced.isdecimal() else False
    if not too_long:
        async for piece in request.stream():
            body += piece
            if too_long := len(body) > limit:
                break
    if too_long:
        message = f"the body is longer than {limit} bytes: send less, or start the server with --max-body-size"
        raise ApiError(413, message, headers={"Connection": "close"})
    return bytes(body)


def json_response(said: Any) -> Response:
    """A success."""
    return Response(msgspec.json.encode(said), media_type="application/json")


def error_response(error: ApiError) -> Response:
    """A failure."""
    return Response(error.body(), error.status, error.headers, media_type="application/json")
