"""Who may queue: a server that takes everything answers nothing in time."""

from __future__ import annotations

from folovllm.server.async_engine import AsyncEngine
from folovllm.server.errors import ApiError

RETRY_AFTER = "1"  # seconds


class Admission:
    """Bounds the requests that wait for their first token, and the tokens of their prompts."""

    def __init__(self, engine: AsyncEngine, max_requests: int, max_tokens: int) -> None:
        self._engine, self._max_requests, self._max_tokens = engine, max_requests, max_tokens

    def check(self, num_requests: int, num_tokens: int = 0) -> None:
        """Raise ApiError unless so much more may queue: 429 to come again, 400 if it never can."""
        engine = self._engine
        for count, queued, most, what in (
            (num_requests, engine.num_queued, self._max_requests, "prompts"),
            (num_tokens, engine.num_queued_tokens, self._max_tokens, "prompt tokens"),
        ):
            if count > most:
                raise ApiError(400, f"the request has {count} {what}, and the queue holds {most}: send fewer at once")
            if queued + count > most:
                message = f"the queue is full ({queued} of {most} {what}): try again in a moment"
                raise ApiError(429, message, code="queue_full", headers={"Retry-After": RETRY_AFTER})
