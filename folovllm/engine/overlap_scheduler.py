"""The scheduler behind overlapped steps, whose tokens arrive late."""

from __future__ import annotations

from typing import Any

from folovllm.engine.scheduler import Scheduler, TokensOfStep
from folovllm.request import Sequence


class OverlapScheduler(Scheduler):
    """A `Scheduler` for steps whose tokens arrive late."""

    def __init__(self, *, tokens_of_step: TokensOfStep, **rest: Any) -> None:
        super().__init__(
            tokens_of_step=lambda seq, budget: 0 if will_finish(seq) else tokens_of_step(seq, budget), **rest
        )

    @property
    def made_room(self) -> bool:
        """Whether a sequence gave way when a step was scheduled last, so that the next one has room."""
        return self._rows.made_room

    def must_wait(self) -> bool:
        """Whether the next step can be scheduled only after the tokens in flight have arrived.

        That is so if a sequence may have to give way: its tokens are computed again, so the host must know all of them.
        """
        budget, size = self._max_num_batched_tokens, self.kv.block_size
        if self.kv.num_free > len(self.running) + budget // size:  # room for any step: no need to look closer
            return False
        most_blocks = sum(min(seq.num_uncomputed_tokens, budget) // size + 1 for seq in self.running)
        return self.kv.num_free < most_blocks


def will_finish(seq: Sequence) -> bool:
    """Whether the tokens in flight bring the answer to its full length: each computed token brings the one after it."""
    return seq.num_computed_tokens + 1 >= seq.num_prompt_tokens + seq.max_tokens
