"""A small model that writes ahead of the large one (Leviathan et al., arXiv 2211.17192), with the same noise.

It samples with the seed, the position and the filters of the sequence. Where both models find about the same tokens likely,
the same noise then makes both sample the same one: they agree more often than two independent samples would.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import TYPE_CHECKING

import numpy as np

from folovllm.spec_decode.proposer import Proposer, RowState
from folovllm.step.sampling_spec import SamplingSpec, TokenIds
from folovllm.step.schedule import ScheduledSequence, SchedulerOutput

if TYPE_CHECKING:
    from folovllm.spec_decode.draft_tokens import DraftTokens
    from folovllm.spec_decode.multi_step import MultiStepExecutor


@dataclass(slots=True, eq=False)
class Draft:
    """What the small model has of one sequence.

    Invariant: the K/V of the first `num_cached` tokens lie in `blocks`; those of the text's first tokens are of use up to
    the first rejected draft token, and what lies behind is written over.
    """

    row: int
    blocks: list[int] = field(default_factory=list)
    num_sent: int = 0  # blocks that the device knows
    num_known: int = 0  # tokens of the text when it was last drafted for
    tokens: list[int] = field(default_factory=list)  # what was drafted behind them, or its placeholder ids
    num_cached: int = 0
    is_new: bool = True  # the device does not know how its tokens are sampled

    def num_accepted(self, state: RowState) -> int:
        """How many of the draft tokens agree with the text, as far as that goes: all if none is seen to be wrong."""
        sampled = state.token_ids[self.num_known :].tolist()
        return next((i for i, (g, t) in enumerate(zip(self.tokens, sampled, strict=False)) if g != t), len(self.tokens))

    def cut_back(self, state: RowState) -> None:
        """Count as cached what agrees with the text. Its newest token never does: its logits are what is wanted."""
        accepted = self.num_accepted(state)
        self.num_cached = min(self.num_cached, self.num_known + accepted, len(state.token_ids) - 1)
        self.num_known, self.tokens = len(state.token_ids), []


class DraftModel(Proposer):
    """Drafts by decoding with a small model: an executor of its own, that no scheduler drives.

    Its blocks are its own. A sequence for which there is no row or block gets no draft; one that is not asked about may
    lose what it has, and is computed again when it is.
    """

    def __init__(
        self,
        executor: MultiStepExecutor,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        block_size: int,
        hand_over: DraftTokens | None = None,
    ) -> None:
        """`executor` runs the small model, in steps of at most so many sequences and tokens, blocks of `block_size`.

        `hand_over`: where the model that verifies finds the tokens by their placeholder ids, which are what is drafted then.
        """
        self._executor, self._hand_over = executor, hand_over
        self._budget, self._max_model_len, self._block_size = max_num_batched_tokens, max_model_len, block_size
        self._rows = list(range(max_num_seqs))
        self._free = list(range(executor.num_kv_blocks))
        self._drafts: dict[int, Draft] = {}  # by seq_id; who was asked about last stands at the end
        self._unresolved: list[Draft] = []  # those whose tokens may be placeholder ids: of the last multi-step decode

    def propose(self, state: RowState, k: int) -> list[int]:
        """As `Proposer`."""
        return self.propose_all([state], [k])[0]

    def propose_all(self, states: Sequence[RowState], ks: Sequence[int]) -> list[list[int]]:
        """As `Proposer`: where a text has grown by much one step over that, and then a multi-step decode."""
        self._learn()
        asked = [(state, k) for state, k in zip(states, ks, strict=True) if k]
        keep = {state.seq_id for state, _ in asked}
        others = iter([seq_id for seq_id in self._drafts if seq_id not in keep])
        placed = [(state, k) for state, k in asked if self._place(state, k, others)]
        written = self._write(self._catch_up(placed))
        self._unresolved = [self._drafts[seq_id] for seq_id in written]
        for draft, tokens in zip(self._unresolved, written.values(), strict=True):
            draft.tokens = tokens
        return [written.get(state.seq_id, []) for state in states]

    def resolve(self, draft: Sequence[int]) -> list[int]:
        """As `Proposer`."""
        if self._hand_over is None:
            return list(draft)
        return self._hand_over.resolve(np.array(draft, np.int32)).tolist()

    def _learn(self) -> None:
        """Resolve the tokens of the last multi-step decode: its placeholder ids mean others when the next one begins."""
        tokens = self.resolve([token for draft in self._unresolved for token in draft.tokens])
        for draft in self._unresolved:
            count = len(draft.tokens)
            draft.tokens, tokens = tokens[:count], tokens[count:]
        self._unresolved = []

    def finish(self, seq_id: int) -> None:
        """As `Proposer`."""
        self._drop(seq_id)

    def close(self) -> None:
        """As `Proposer`."""
        self._executor.shutdown()

    def _drop(self, seq_id: int) -> None:
        draft = self._drafts.pop(seq_id, None)
        if draft is not None:
            self._rows.append(draft.row)
            self._free += draft.blocks

    def _place(self, state: RowState, k: int, others: Iterator[int]) -> bool:
        """Give `state` a row and blocks for `k` draft tokens, at need those of the next of `others`; False if there are too few.

        The last draft token is sampled and not computed.
        """
        length = len(state.token_ids) + k - 1
        if length > self._max_model_len:
            return False
        draft = self._drafts.pop(state.seq_id, None)
        missing = -(-length // self._block_size) - len(draft.blocks if draft else ())
        while (len(self._free) < missing or not (draft or self._rows)) and (other := next(others, None)) is not None:
            self._drop(other)
        if draft is None:
            if not self._rows:
                return False
            draft = Draft(self._rows.pop())
        self._drafts[state.seq_id] = draft  # at the end
        if len(self._free) < missing:
            return False
        draft.blocks += [self._free.pop() for _ in range(missing)]
        return True

    def _catch_up(self, placed: list[tuple[RowState, int]]) -> list[tuple[RowState, int]]:
        """Compute what texts have before their newest tokens, and tell the device of new rows. Returns who can be drafted for now.

        Behind a draft that was accepted as a whole a text lacks two tokens, and else one: these are left to the multi-step decode. Of a text beyond
        the budget a part is computed.
        """
        budget, scheduled_seqs, ready = self._budget - len(placed), [], []
        for state, k in placed:
            draft = self._drafts[state.seq_id]
            draft.cut_back(state)
            missing = len(state.token_ids) - 1 - draft.num_cached
            num_new = 0
            if missing > 1 or draft.is_new:
                num_new = min(max(1, missing), 1 + max(0, budget))
                budget -= num_new - 1
                tokens = state.token_ids[draft.num_cached : draft.num_cached + num_new]
                scheduled_seqs.append(self._scheduled(state, tokens, num_new, 0))
                draft.is_new = False
            if num_new >= missing - 1:
                draft.num_cached = min(draft.num_cached, len(state.token_ids) - 1)
                ready.append((state, k))
        if scheduled_seqs:
            self._executor.submit(
                SchedulerOutput(tuple(sorted(scheduled_seqs, key=lambda scheduled: scheduled.num_new_tokens)))
            )
        return ready

    def _write(self, ready: list[tuple[RowState, int]]) -> dict[int, list[int]]:
        """Let the model write: one token a step, first those of the text that are left, then those that it sampled."""
        left = {state.seq_id: state.token_ids[self._drafts[state.seq_id].num_cached :] for state, _ in ready}
        writers = [(state, left[state.seq_id], len(left[state.seq_id]) - 1 + k) for state, k in ready]
        writers.sort(key=lambda writer: -writer[2])  # so that each has the same place in all of its steps
        if not writers:
            return {}
        steps = [
            SchedulerOutput(
                tuple(self._scheduled(state, tokens[i : i + 1], 1, 1) for state, tokens, end in writers if i < end)
            )
            for i in range(writers[0][2])
        ]
        run = self._executor.submit_steps(steps)
        if self._hand_over is not None and run.placeholder_ids is not None:
            sampled = run.placeholder_ids[:, : len(writers)].T.tolist()
        else:
            by_step = ([token for (token,) in step.token_ids] for step in run.wait())
            sampled = [list(tokens) for tokens in zip_longest(*by_step)]
        return {
            state.seq_id: tokens[len(given) - 1 : end]
            for tokens, (state, given, end) in zip(sampled, writers, strict=False)
        }

    def _scheduled(self, state: RowState, tokens: TokenIds, num_new: int, num_samples: int) -> ScheduledSequence:
        """The next `num_new` tokens of a sequence; without `tokens`, the one that was sampled last and is on the device."""
        draft = self._drafts[state.seq_id]
        start, end = draft.num_cached, draft.num_cached + num_new
        first, needed = draft.num_sent, -(-end // self._block_size)
        draft.num_cached, draft.num_sent = end, max(first, needed)
        blocks, sampling = (
            tuple(draft.blocks[first:needed]),
            sampling_without_history(state.sampling) if draft.is_new else None,
        )
        return ScheduledSequence(state.seq_id, draft.row, start, num_new, tokens, blocks, first, num_samples, sampling)


def sampling_without_history(spec: SamplingSpec) -> SamplingSpec:
    """The noise and the filters of a sequence, without what depends on the tokens so far: draft tokens may be rejected, and stay."""
    return SamplingSpec(spec.seed, spec.temperature, spec.top_k, spec.top_p, spec.min_p)
