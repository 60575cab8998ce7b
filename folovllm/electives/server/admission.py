"""Who may queue: a server that takes everything answers nothing in time."""

from __future__ import annotations

from folovllm.electives.server.async_engine import AsyncEngine
from folovllm.electives.server.errors import ApiError

RETRY_AFTER = "1"  # seconds


class Admission:
    """Bounds the sequences that wait for their first token, and the tokens of their prompts."""

    def __init__(self, engine: AsyncEngine, max_requests: int, max_tokens: int) -> None:
        self._engine, self._max_requests, self._max_tokens = engine, max_requests, max_tokens

    def check(self, num_seqs: int, num_tokens: int = 0) -> None:
        """Raise ApiError unless so many more sequences, with so many prompt tokens, may queue.

        What waits already is `self._engine.num_queued` sequences, whose prompts have `num_queued_tokens` tokens;
        `self._max_requests` and `self._max_tokens` bound the two. The message of a refusal names what is too much: "sequences" or
        "prompt tokens".

        Raises:
            ApiError: with status 400 if one of the two would not fit into an empty queue either, since to try again would
                never help; else 429 if one does not fit now, with the code "queue_full" and the header `Retry-After`,
                `RETRY_AFTER` seconds.
        """
        engine = self._engine
        budgets = (
            (num_seqs, engine.num_queued, self._max_requests, "sequences"),
            (num_tokens, engine.num_queued_tokens, self._max_tokens, "prompt tokens"),
        )
        for count, _, most, what in budgets:
            if count > most:
                raise ApiError(400, f"the request has {count} {what}, and the queue holds {most}: send fewer at once")
        for count, queued, most, what in budgets:
            if queued + count > most:
                message = f"the queue is full ({queued} of {most} {what}): try again in a moment"
                raise ApiError(429, message, code="queue_full", headers={"Retry-After": RETRY_AFTER})
