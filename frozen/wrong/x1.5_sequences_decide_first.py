"""Looks at the sequences, both statuses, before the tokens. Input: the queue is full of sequences, and the prompt has more tokens than ever fit: 429, not 400."""

class Admission:
    def check(self, num_seqs, num_tokens=0):
        engine = self._engine
        for new, old, most, what in (
            (num_seqs, engine.num_queued, self._max_requests, "sequences"),
            (num_tokens, engine.num_queued_tokens, self._max_tokens, "prompt tokens"),
        ):
            if new > most:
                raise ApiError(400, f"{new} {what} are too many: at most {most} may queue")
            if old + new > most:
                raise ApiError(
                    429, f"too many {what} are queued", code="queue_full", headers={"Retry-After": RETRY_AFTER}
                )
