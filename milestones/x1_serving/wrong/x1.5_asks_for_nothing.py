"""Lets a request for no sequence through without a look at its tokens."""


class Admission:
    def check(self, num_seqs, num_tokens=0):
        if not num_seqs:
            return
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
