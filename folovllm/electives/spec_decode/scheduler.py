"""A scheduler whose steps verify draft tokens: a sequence computes its newest token and k draft tokens, and samples k + 1."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from folovllm.cache.prefix_cache import PrefixCachingBlockManager
from folovllm.electives.spec_decode.speculation import Speculation
from folovllm.electives.spec_decode.verify import max_samples
from folovllm.engine.events import DraftsVerified
from folovllm.engine.scheduler import BatchRows, Scheduler
from folovllm.executor.abstract import Executor
from folovllm.request import Sequence, SequenceOutput
from folovllm.step.packed import IN_FLIGHT_TOKENS
from folovllm.step.schedule import ScheduledSequence, SchedulerOutput


class DraftRows(BatchRows):
    """`BatchRows` whose scheduled sequences have draft tokens behind the tokens that are known.

    Attributes:
        drafts: of the coming step, by seq_id.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.drafts: dict[int, list[int]] = {}

    def maker(self) -> Callable[[Sequence, int], ScheduledSequence]:
        """Return what makes a scheduled sequence; it looks for drafts only where the coming step has some."""
        return self._scheduled_with_draft if self.drafts else self.scheduled

    def _scheduled_with_draft(self, seq: Sequence, num_new_tokens: int) -> ScheduledSequence:
        """Return a scheduled sequence with its draft. Only its newest token is not computed before; that one may be in flight."""
        scheduled, draft = self.scheduled(seq, num_new_tokens), self.drafts.get(seq.seq_id)
        if draft is None:
            return scheduled
        newest = scheduled.token_ids if len(scheduled.token_ids) else IN_FLIGHT_TOKENS
        tokens = np.array(draft[: num_new_tokens - 1], np.int32)
        return scheduled._replace(token_ids=np.concatenate([newest, tokens]), num_samples=num_new_tokens)

    def row_of(self, seq_id: int) -> int:
        """Return the row of a running sequence."""
        return self._rows[seq_id].number

    def cut(self, seq: Sequence) -> None:
        """Note that the table of `seq` has become shorter: the devices get new blocks behind its end again."""
        row = self._rows[seq.seq_id]
        row.num_sent = min(row.num_sent, len(seq.block_table))


class Verifying(NamedTuple):
    """A step under way that verifies drafts."""

    number: int
    scheduled_seqs: list[ScheduledSequence]  # those with drafts
    num_draft_tokens: dict[int, int]  # by seq_id


class SpeculativeScheduler(Scheduler):
    """A `Scheduler` that lets the model verify drafts.

    Draft tokens are in a `ScheduledSequence` and nowhere else: a `Sequence` has only tokens that were sampled, and no block with a draft token
    in it gets a hash. A step never preempts for a draft: where room or budget is short, fewer tokens are verified.
    """

    def __init__(
        self, *, speculation: Speculation, executor: Executor | None = None, num_recomputed: int = 0, **rest: Any
    ) -> None:
        """`executor`: of the model that verifies, for a proposer that drafts on its device.

        `num_recomputed`: 1 with a draft head. Its K/V of a block's last token depend on the token behind, and a hit brings no
        hidden state: so the last block of a hit is computed again, and each block that is not has the one behind it in common.
        """
        super().__init__(**rest)
        if isinstance(self.kv, PrefixCachingBlockManager):
            self.kv.num_recomputed = num_recomputed
        self.speculation = speculation
        self._rows: DraftRows = DraftRows(self._max_num_seqs, self.kv, lambda: self.waiting)
        if executor is not None:
            speculation.proposer.bind(executor, self._rows.row_of)
        self._num_samples = min(self._max_num_batched_tokens, max_samples(self._max_num_seqs))  # of a step, at most
        self._plain_tokens = self._tokens_of_step
        self._num_done = 0  # steps whose tokens have arrived
        self._verifying: Verifying | None = None  # nothing is scheduled behind it

    def add(self, seq: Sequence) -> None:
        """Queue a sequence, and tell the speculation."""
        self.speculation.add(seq, self._rows.num_steps)
        super().add(seq)

    def schedule(self) -> SchedulerOutput:
        """Decide the next step, with drafts where these may pay.

        Sequences with drafts come behind other decodes, which have a kernel of their own. The parent is called by its name,
        since `super()` takes longer than all else that a step without drafts does here.
        """
        number = self._rows.num_steps
        if number < self.speculation.propose_from:
            return Scheduler.schedule(self)
        drafts = self._fitting(self.speculation.propose(self.running, self._num_samples - len(self.running), number))
        if drafts:
            self._rows.drafts, self._tokens_of_step = drafts, self._tokens_with_draft
            self.running.sort(key=lambda seq: seq.seq_id in drafts)
        output = Scheduler.schedule(self)
        if drafts:
            self._rows.drafts, self._tokens_of_step = {}, self._plain_tokens
            scheduled_seqs = [scheduled for scheduled in output.scheduled_seqs if scheduled.num_samples > 1]
            if scheduled_seqs:
                self._verifying = Verifying(
                    number, scheduled_seqs, {s.seq_id: s.num_samples - 1 for s in scheduled_seqs}
                )
        return output

    def must_wait(self) -> bool:
        """Return whether the next step waits for the tokens in flight: it does while drafts are verified."""
        return self._verifying is not None or Scheduler.must_wait(self)

    def postprocess(self, sampled: Iterable[tuple[Sequence, list[int]]]) -> list[SequenceOutput]:
        """Append the tokens that a step sampled, and take back the blocks of rejected draft tokens."""
        num_running, step = len(self.running), self._verifying
        if step is None or step.number != self._num_done:
            outputs = Scheduler.postprocess(self, sampled)
        else:
            if self.events.on:
                self._resolve(step.scheduled_seqs)
            tokens = self._one_by_one(sampled, step.num_draft_tokens)
            outputs = joined(Scheduler.postprocess(self, tokens))
            self._verifying = None
        self._num_done += 1
        if len(self.running) < num_running:
            self.speculation.finish([output.seq for output in outputs if output.status is not None])
        return outputs

    def abort(self, *seqs: Sequence) -> None:
        """End sequences at once, and tell the speculation."""
        super().abort(*seqs)
        self.speculation.finish(seqs)

    def _resolve(self, scheduled_seqs: list[ScheduledSequence]) -> None:
        """Replace placeholder ids with the tokens of the draft model, for listeners."""
        for scheduled in scheduled_seqs:
            scheduled.token_ids[:] = self.speculation.proposer.resolve(scheduled.token_ids.tolist())

    def _one_by_one(
        self, sampled: Iterable[tuple[Sequence, list[int]]], num_draft_tokens: dict[int, int]
    ) -> Iterator[tuple[Sequence, list[int]]]:
        """Yield the pairs of `sampled`; of a sequence with a draft token by token, as if steps without drafts had sampled them.

        So each token meets the same checks, and the same blocks get hashes, as without a draft. Tokens behind the end of the
        answer are cut off the list.
        """
        for seq, token_ids in sampled:
            num_drafted = num_draft_tokens.get(seq.seq_id)
            if num_drafted is None or not token_ids:  # none: a grammar was broken
                yield seq, token_ids
                continue
            num_accepted, num_known = len(token_ids) - 1, seq.num_tokens
            self.speculation.verified(seq, num_drafted, num_accepted)
            if self.events.on:
                self.events.emit(DraftsVerified(seq.seq_id, num_drafted, num_accepted))
            for token_id in token_ids:
                if not seq.status.is_finished:
                    seq.num_computed_tokens = seq.num_tokens
                    yield seq, [token_id]
            del token_ids[seq.num_tokens - num_known :]
            if not seq.status.is_finished:
                self.kv.truncate(seq)
                self._rows.cut(seq)

    def _tokens_with_draft(self, seq: Sequence, budget: int) -> int:
        """Return how many tokens a step computes of `seq`, its draft included."""
        n = self._plain_tokens(seq, budget)
        return min(budget, n + len(self._rows.drafts.get(seq.seq_id, ()))) if n else 0

    def _fitting(self, drafts: dict[int, list[int]]) -> dict[int, list[int]]:
        """Return the draft tokens that fit: they take no block and no token of the budget that a running sequence needs."""
        if not drafts:
            return drafts
        budget = self._max_num_batched_tokens
        tokens = self._num_samples - len(self.running)
        blocks, fitting = self.kv.num_free, {}
        for seq in self.running:
            blocks -= self._missing(seq, min(seq.num_uncomputed_tokens, budget))
        for seq in self.running:
            own = drafts.get(seq.seq_id, [])[: max(0, tokens)]
            needed = self._missing(seq, 1 + len(own)) - self._missing(seq, 1)
            if own and needed <= blocks:
                fitting[seq.seq_id] = own
                tokens, blocks = tokens - len(own), blocks - needed
        return fitting

    def _missing(self, seq: Sequence, num_new_tokens: int) -> int:
        """Return how many blocks the table of `seq` lacks for its next tokens."""
        needed = -(-(seq.num_computed_tokens + num_new_tokens) // self.kv.block_size)
        return max(0, needed - len(seq.block_table))


def joined(outputs: Iterable[SequenceOutput]) -> list[SequenceOutput]:
    """Return one output for each sequence; `outputs` has one for each token."""
    found: dict[int, SequenceOutput] = {}  # by seq_id
    for seq, token_ids, status in outputs:
        before = found[seq.seq_id].new_token_ids if seq.seq_id in found else []
        found[seq.seq_id] = SequenceOutput(seq, before + token_ids, status)
    return list(found.values())
