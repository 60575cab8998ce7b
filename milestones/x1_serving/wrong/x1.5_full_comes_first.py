"""Looks at one budget after the other: a prompt that can never fit is asked to come again while the queue of sequences is full."""


class Admission:
    def check(self, num_seqs, num_tokens=0):
        engine = self._engine
        for count, queued, most, what in (
            (num_seqs, engine.num_queued, self._max_requests, "sequences"),
            (num_tokens, engine.num_queued_tokens, self._max_tokens, "prompt tokens"),
        ):
            if count > most:
                raise ApiError(400, f"the request has {count} {what}, and the queue holds {most}: send fewer at once")
            if queued + count > most:
                message = f"the queue is full ({queued} of {most} {what}): try again in a moment"
                raise ApiError(429, message, code="queue_full", headers={"Retry-After": RETRY_AFTER})
