"""What a client is told when something is not possible: a status, and `{"error": {message, type, param, code}}`."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

import msgspec

logger = logging.getLogger("folovllm")
TYPES = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error", 500: "server_error",
    503: "service_unavailable_error",
}  # fmt: skip


class EngineDead(RuntimeError):
    """The engine has ended: make a new one. The message says how it ended."""


class Unavailable(RuntimeError):
    """The engine takes no new requests: it drains, sleeps, or was closed."""


class ErrorInfo(msgspec.Struct):
    """What was not possible, and why."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct):
    """The JSON of every answer that is no success."""

    error: ErrorInfo


@dataclass(eq=False)
class ApiError(Exception):
    """An answer that is no success: a status of HTTP, and a sentence that says what to do.

    Attributes:
        param: the field that is meant.
        code: a word for programs.
        headers: of the response.
    """

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    headers: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.message

    def body(self) -> bytes:
        """The JSON that says it."""
        kind = TYPES.get(self.status, "invalid_request_error")
        return msgspec.json.encode(ErrorBody(ErrorInfo(self.message, kind, self.param, self.code)))


def as_api_error(error: Exception, fields: tuple[str, ...] = ()) -> ApiError:
    """What a client is told of an error: a ValueError is the client's fault, and what nobody expected is logged.

    `fields` are those that the first word may name.
    """
    if isinstance(error, ApiError):
        return error
    if isinstance(error, Unavailable):
        return ApiError(503, str(error), code="unavailable")
    if isinstance(error, EngineDead):
        return ApiError(500, f"the engine has ended: {error}", code="engine_dead")
    if isinstance(error, ValueError):
        first = str(error).partition(" ")[0]
        return ApiError(400, str(error), param=first if first in fields else None)
    logger.error("a request failed", exc_info=error)
    return ApiError(500, "the server failed at this request, and its log says how")
