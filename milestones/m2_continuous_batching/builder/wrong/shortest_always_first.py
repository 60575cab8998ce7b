"""Always the shortest prompt first: while short ones keep coming, a long one never gets its turn."""

from __future__ import annotations

from folovllm.learn.builders.reference import Scheduler as Right
from folovllm.request import Sequence


class Scheduler(Right):
    def _rank(self, seq: Sequence) -> tuple[bool, int, int]:
        return True, seq.num_tokens, seq.seq_id
