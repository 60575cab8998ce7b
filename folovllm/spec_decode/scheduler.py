"""Schedulers whose steps check guesses: a sequence computes its newest token and k guessed ones, and draws k + 1."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

import numpy as np

from folovllm.engine.plan import Rows
from folovllm.engine.scheduler import Scheduler
from folovllm.events import GuessesChecked
from folovllm.request import Sequence
from folovllm.spec_decode.speculation import Speculation
from folovllm.spec_decode.verify import most_draws
from folovllm.step.packed import FLYING
from folovllm.step.schedule import SchedulerOutput, Share

NO_GUESSES: dict[int, Any] = {}


class GuessingRows(Rows):
    """`Rows` whose shares have guesses behind the tokens that are known."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.guesses: dict[int, list[int]] = {}

    def expect(self, guesses: dict[int, list[int]]) -> None:
        """The coming step has these guesses, by seq_id. Where there are none, shares are made as ever, with nothing between."""
        if guesses:
            self.share = self._share_with_guesses  # type: ignore[method-assign]
        elif self.guesses:
            del self.share
        self.guesses = guesses

    def _share_with_guesses(self, seq: Sequence, num_new_tokens: int) -> Share:
        """As `share`; of a sequence with guesses all tokens but these and the newest are computed. That may be in flight."""
        share, guesses = super().share(seq, num_new_tokens), self.guesses.get(seq.seq_id)
        if guesses is None:
            return share
        newest = share.token_ids if len(share.token_ids) else FLYING
        tokens = np.array(guesses[: num_new_tokens - 1], np.int32)
        return share._replace(token_ids=np.concatenate([newest, tokens]), num_draws=num_new_tokens)

    def cut(self, seq: Sequence) -> None:
        """The table of `seq` has become shorter: what the devices know behind its end counts no more."""
        row = self._rows[seq.seq_id]
        row.num_sent = min(row.num_sent, len(seq.block_table))


class SpeculativeScheduler(Scheduler):
    """A `Scheduler` that lets the model check guesses.

    Guesses are in shares and nowhere else: a sequence has only tokens that were drawn, and no block with a guess in it
    gets a name. A step never preempts for a guess: where room or budget is short, fewer are checked.
    """

    def __init__(self, *, speculation: Speculation, **rest: Any) -> None:
        super().__init__(**rest)
        self.speculation = speculation
        self._own_tokens = self._tokens_of_step
        self._num_draws = min(self._max_num_batched_tokens, most_draws(self._max_num_seqs))  # of a step, at most
        self._rows: GuessingRows = GuessingRows(self._rows.num_rows, self.events, lambda: self.waiting)
        self._num_taken = 0  # steps
        # Of those under way that are not idle: their numbers, and their guesses by seq_id.
        self._under_way: deque[tuple[int, dict[int, int]]] = deque()
        self._with_guesses: list[Share] = []  # of the step that has some

    def add(self, seq: Sequence) -> None:
        """As `Scheduler`."""
        if not (self.running or self.waiting):
            self.speculation.resume()
        super().add(seq)
        self.speculation.wake(seq, self._rows.num_steps)

    def schedule(self) -> SchedulerOutput:
        """As `Scheduler`. Sequences with guesses come behind other decodes, which have a kernel of their own.

        Parents are asked by name: to look one up takes longer than all else that an idle step does here.
        """
        number = self._rows.num_steps
        if number < self.speculation.idle_until:
            return Scheduler.schedule(self)
        guesses = self.speculation.guess(self.running, self._num_draws - len(self.running), number)
        if guesses or self._rows.guesses:
            self._expect(self._fitting(guesses))
        output = Scheduler.schedule(self)
        if output.shares:
            self._under_way.append((number, num_guessed(output) if guesses else NO_GUESSES))
            self.speculation.began(output)
            if guesses:
                self._with_guesses = [share for share in output.shares if share.num_draws > 1]
        return output

    def must_wait(self) -> bool:
        """As `Scheduler`. Nothing is scheduled behind a step with guesses until it is known what came of them.

        Steps without guesses overlap as ever.
        """
        if self._under_way and (self.speculation.waits or any(guesses for _, guesses in self._under_way)):
            return True
        return Scheduler.must_wait(self)

    def _expect(self, guesses: dict[int, list[int]]) -> None:
        self._rows.expect(guesses)
        self._tokens_of_step = self._tokens_with_guesses if guesses else self._own_tokens
        if guesses:
            self.running.sort(key=lambda seq: seq.seq_id in guesses)

    def postprocess(self, drawn: Iterable[tuple[Sequence, list[int]]]) -> list[Sequence]:
        """As `Scheduler`: a share with guesses that drew m tokens counts as m steps of one token each.

        So each token meets the same checks, and its K/V becomes known to the cache at the same moment, as without guesses.
        After an exception the step goes on with the next call, which gets the pairs behind the one that raised it.
        """
        before = self.running[:]
        try:
            if self._under_way and self._under_way[0][0] == self._num_taken:
                updated = self._take_in(drawn, self._under_way[0][1])
                self._under_way.popleft()
            else:
                updated = Scheduler.postprocess(self, drawn)
            self._num_taken += 1
        finally:
            if len(self.running) < len(before):
                self._tell_of_ends(before)
        return updated

    def _tell_of_ends(self, before: list[Sequence]) -> None:
        self.speculation.finish([seq for seq in before if seq.status.is_finished])
        if self.waiting:
            self.speculation.wake(self.waiting[0], self._rows.num_steps)
        elif not self.running:
            self.speculation.pause()

    def _take_in(self, drawn: Iterable[tuple[Sequence, list[int]]], checked: dict[int, int]) -> list[Sequence]:
        """The tokens of a step that is not idle; `checked`: its guesses."""
        if not checked:
            updated = super().postprocess(drawn)
        else:
            if self.events.on:
                self._spell_guesses()
            updated = [seq for pair in drawn for seq in self._take(*pair, checked.get(pair[0].seq_id, 0))]
        self.speculation.ended()
        return updated

    def _spell_guesses(self) -> None:
        """Write tokens in place of their names: who watches is shown what was guessed."""
        for share in self._with_guesses:
            share.token_ids[:] = self.speculation.proposer.tokens_of(share.token_ids.tolist())

    def abort(self, *seqs: Sequence) -> None:
        """As `Scheduler`."""
        super().abort(*seqs)
        self.speculation.forget(seqs)

    def _take(self, seq: Sequence, token_ids: list[int], num_guessed: int) -> list[Sequence]:
        """Take in the tokens of one share, and cut off what was reserved and computed for wrong guesses."""
        if not num_guessed:
            return super().postprocess([(seq, token_ids)])
        self.speculation.checked(seq, num_guessed, len(token_ids) - 1)
        if self.events.on:
            self.events.emit(GuessesChecked(seq.seq_id, num_guessed, len(token_ids) - 1))
        seq.num_computed_tokens -= num_guessed + 1
        for i, token_id in enumerate(token_ids, 1):
            seq.num_computed_tokens += 1
            super().postprocess([(seq, [token_id])])
            if seq.status.is_finished:
                del token_ids[i:]  # nobody hears of what was drawn behind the end
                return [seq]
        self.kv.truncate(seq)
        self._rows.cut(seq)
        return [seq]

    def _tokens_with_guesses(self, seq: Sequence, budget: int) -> int:
        """What a step computes of `seq`, guesses included."""
        n = self._own_tokens(seq, budget)
        return min(budget, n + len(self._rows.guesses.get(seq.seq_id, ()))) if n else 0

    def _fitting(self, guesses: dict[int, list[int]]) -> dict[int, list[int]]:
        """As many of the guesses as need nothing that a running sequence needs without them."""
        if not guesses:
            return guesses
        budget = self._max_num_batched_tokens
        tokens = self._num_draws - len(self.running)
        blocks, fitting = self.kv.num_free, {}
        for seq in self.running:
            blocks -= self._missing(seq, min(seq.num_uncomputed_tokens, budget))
        for seq in self.running:
            own = guesses.get(seq.seq_id, [])[: max(0, tokens)]
            needed = self._missing(seq, 1 + len(own)) - self._missing(seq, 1)
            if own and needed <= blocks:
                fitting[seq.seq_id] = own
                tokens, blocks = tokens - len(own), blocks - needed
        return fitting

    def _missing(self, seq: Sequence, num_new_tokens: int) -> int:
        """Blocks that the table of `seq` lacks for its next tokens."""
        needed = -(-(seq.num_computed_tokens + num_new_tokens) // self.kv.block_size)
        return max(0, needed - len(seq.block_table))


def num_guessed(output: SchedulerOutput) -> dict[int, int]:
    """Guesses of each sequence that has some, by seq_id."""
    return {share.seq_id: share.num_draws - 1 for share in output.shares if share.num_draws > 1}
