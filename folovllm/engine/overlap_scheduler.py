"""The scheduler behind overlapped steps: tokens arrive late, and sequences have rows on the device."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from folovllm.engine.scheduler import MakeRoom, Scheduler, SchedulerOutput, TokensOfStep
from folovllm.request import Sequence


class OverlapScheduler(Scheduler):
    """A `Scheduler` for steps whose tokens arrive late, and whose sequences have rows in the device's tables.

    Invariant: a sequence has a row, its own, exactly while it runs.
    """

    def __init__(self, *, tokens_of_step: TokensOfStep, make_room: MakeRoom, max_num_seqs: int, **rest: Any) -> None:
        super().__init__(
            tokens_of_step=lambda seq, budget: 0 if will_finish(seq) else tokens_of_step(seq, budget),
            make_room=self._make_room_and_free_row,
            max_num_seqs=max_num_seqs,
            **rest,
        )
        self._give_way = make_room
        self._free_rows = list(reversed(range(max_num_seqs)))

    def schedule(self) -> SchedulerOutput:
        """As without overlap; newcomers get a row."""
        output = super().schedule()
        for item in output.scheduled:
            if item.seq.row < 0:
                item.seq.row = self._free_rows.pop()
        return output

    def postprocess(self, output: SchedulerOutput, token_ids: Iterable[int]) -> list[Sequence]:
        """As without overlap, but a sequence that ended while this step was under way gets nothing more."""
        alive = [
            (item, token_id)
            for item, token_id in zip(output.scheduled, token_ids, strict=True)
            if not item.seq.status.is_finished
        ]
        updated = super().postprocess(SchedulerOutput([item for item, _ in alive]), [token_id for _, token_id in alive])
        for seq in updated:
            if seq.status.is_finished:
                self._free_row(seq)
        return updated

    def abort(self, *seqs: Sequence) -> None:
        """End sequences at once; what they have in flight is dropped when it arrives."""
        super().abort(*seqs)
        for seq in seqs:
            self._free_row(seq)

    def must_wait(self) -> bool:
        """Whether the next step can only be scheduled once nothing is in flight.

        That is so if somebody may have to give way (a victim's tokens must all be known, to be computed again), or if a
        draw depends on the tokens before it (penalties).
        """
        if any(seq.params.has_penalties for seq in self.running):
            return True
        budget, size = self._max_num_batched_tokens, self.kv.block_size
        if self.kv.num_free > len(self.running) + budget // size:  # room for any step: no need to look closer
            return False
        most_pages = sum(min(seq.num_uncomputed_tokens, budget) // size + 1 for seq in self.running)
        return self.kv.num_free < most_pages

    def _make_room_and_free_row(self, scheduler: Scheduler, candidates: list[Sequence]) -> Sequence | None:
        victim = self._give_way(scheduler, candidates)
        if victim is not None:
            self._free_row(victim)
        return victim

    def _free_row(self, seq: Sequence) -> None:
        if seq.row >= 0:
            self._free_rows.append(seq.row)
            seq.row, seq.num_sent_blocks = -1, 0


def will_finish(seq: Sequence) -> bool:
    """Whether the tokens in flight bring the answer to its full length, so that no step needs to be computed."""
    return seq.num_output_tokens + seq.num_in_flight >= seq.max_tokens
