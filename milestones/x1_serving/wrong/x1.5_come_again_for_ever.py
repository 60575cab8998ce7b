"""Says 429 to a request that can never fit. A client that heeds it comes again, and again."""


class Admission:
    def check(self, num_seqs, num_tokens=0):
        engine = self._engine
        budgets = (
            (num_seqs, engine.num_queued, self._max_requests, "sequences"),
            (num_tokens, engine.num_queued_tokens, self._max_tokens, "prompt tokens"),
        )
        for count, queued, most, what in budgets:
            if queued + count > most:
                message = f"the queue is full ({queued} of {most} {what}): try again in a moment"
                raise ApiError(429, message, code="queue_full", headers={"Retry-After": RETRY_AFTER})
