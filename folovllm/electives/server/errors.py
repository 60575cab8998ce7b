"""What a client is told when something is not possible: a status, and `{"error": {message, type, param, code}}`."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

TYPES = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error", 500: "server_error",
    503: "service_unavailable_error",
}  # fmt: skip


class EngineDead(RuntimeError):
    """The engine has ended: make a new one. The message says how it ended."""


class Unavailable(RuntimeError):
    """The engine takes no new requests: it drains, sleeps, or was closed."""


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
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": error})
