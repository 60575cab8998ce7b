"""A small model that writes ahead of the large one (Leviathan et al., arXiv 2211.17192), with the same noise.

It draws with the seed, the position and the filters of the sequence. Where both models find about the same tokens likely,
the same noise then makes both draw the same one: they agree more often than two independent draws would.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from folovllm.executor.abstract import AsyncExecutor, Pending
from folovllm.spec.proposer import Proposer, RowState
from folovllm.step.draw import DrawSpec, no_tokens
from folovllm.step.schedule import SchedulerOutput, Share

MOST_IN_FLIGHT = 4  # steps whose tokens are on their way: an executor keeps those of a few


@dataclass(slots=True, eq=False)
class Draft:
    """What the small model has of one sequence.

    Invariant: the K/V of the first `num_cached` tokens lie in `blocks`; those of the text's first tokens are of use up to
    the first wrong guess, and what lies behind is written over.
    """

    row: int
    blocks: list[int] = field(default_factory=list)
    num_sent: int = 0  # blocks that the device knows
    num_known: int = 0  # tokens of the text when guesses were last made; all of them were right
    guesses: list[int] = field(default_factory=list)  # what was written behind them
    num_cached: int = 0
    is_new: bool = True  # the device does not know how its tokens are drawn

    def cut_back(self, state: RowState) -> None:
        """Count as cached what agrees with the text. Its newest token never does: its logits are what is wanted."""
        drawn = state.token_ids[self.num_known :].tolist()
        right = next(
            (i for i, (g, t) in enumerate(zip(self.guesses, drawn, strict=False)) if g != t), len(self.guesses)
        )
        self.num_cached = min(self.num_cached, self.num_known + right, len(state.token_ids) - 1)
        self.num_known, self.guesses = len(state.token_ids), []


class DraftModel(Proposer):
    """Guesses by decoding with a small model: an executor of its own, that no scheduler drives.

    Its blocks are its own. A sequence for which there is no row or block gets no guesses; one that is not asked about may
    lose what it has, and is computed again when it is.
    """

    def __init__(
        self,
        executor: AsyncExecutor,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        block_size: int,
    ) -> None:
        """`executor` runs the small model, in steps of at most so many sequences and tokens, blocks of `block_size`."""
        self._executor = executor
        self._budget, self._max_model_len, self._block_size = max_num_batched_tokens, max_model_len, block_size
        self._rows = list(range(max_num_seqs))
        self._free = list(range(executor.num_kv_blocks))
        self._drafts: dict[int, Draft] = {}  # by seq_id; who was asked about last stands at the end

    def propose(self, state: RowState, k: int) -> list[int]:
        """As `Proposer`."""
        return self.propose_all([state], [k])[0]

    def propose_all(self, states: Sequence[RowState], ks: Sequence[int]) -> list[list[int]]:
        """As `Proposer`: one step over what is new in the texts, then steps of one token that nobody waits for."""
        asked = [(state, k) for state, k in zip(states, ks, strict=True) if k]
        keep = {state.seq_id for state, _ in asked}
        placed = [(state, k) for state, k in asked if self._place(state, k, keep)]
        shares, depths = self._catch_up(placed)
        guesses = self._guess(shares, depths)
        for seq_id, tokens in guesses.items():
            self._drafts[seq_id].guesses = tokens
        return [guesses.get(state.seq_id, []) for state in states]

    def finish(self, seq_id: int) -> None:
        """As `Proposer`."""
        draft = self._drafts.pop(seq_id, None)
        if draft is not None:
            self._rows.append(draft.row)
            self._free += draft.blocks

    def _place(self, state: RowState, k: int, keep: set[int]) -> bool:
        """Give `state` a row and blocks for `k` guesses; False if there are none, nor a sequence outside `keep` that has some.

        The last guess is drawn and not computed.
        """
        length = len(state.token_ids) + k - 1
        if length > self._max_model_len:
            return False
        draft = self._drafts.pop(state.seq_id, None)
        missing = -(-length // self._block_size) - len(draft.blocks if draft else ())
        for other in [seq_id for seq_id in self._drafts if seq_id not in keep]:
            if len(self._free) >= missing and (draft or self._rows):
                break
            self.finish(other)
        if draft is None:
            if not self._rows:
                return False
            draft = Draft(self._rows.pop())
        self._drafts[state.seq_id] = draft  # at the end
        if len(self._free) < missing:
            return False
        draft.blocks += [self._free.pop() for _ in range(missing)]
        return True

    def _catch_up(self, placed: list[tuple[RowState, int]]) -> tuple[list[Share], dict[int, int]]:
        """The first step, and how far to guess for each sequence. Of a text beyond the budget a part is computed, and no guess."""
        budget, shares, depths = self._budget - len(placed), [], {}
        for state, k in placed:
            draft = self._drafts[state.seq_id]
            draft.cut_back(state)
            missing = len(state.token_ids) - draft.num_cached
            num_new = min(missing, 1 + max(0, budget))
            budget -= num_new - 1
            if num_new == missing:
                depths[state.seq_id] = k
            tokens = state.token_ids[draft.num_cached : draft.num_cached + num_new]
            share = self._share(state.seq_id, num_new, int(num_new == missing))
            shares.append(share._replace(token_ids=tokens, draw=how_to_draw(state.draw) if draft.is_new else None))
            draft.is_new = False
        return sorted(shares, key=lambda share: share.num_new_tokens), depths

    def _guess(self, shares: list[Share], depths: dict[int, int]) -> dict[int, list[int]]:
        """Run the step of `shares`, and then one step of one token after the other for those that guess further."""
        guesses: dict[int, list[int]] = {seq_id: [] for seq_id in depths}
        in_flight: deque[tuple[list[Share], Pending]] = deque()

        def take_in() -> None:
            done, step = in_flight.popleft()
            for share, tokens in zip(done, step.wait().token_ids, strict=True):
                if tokens:
                    guesses[share.seq_id] += tokens

        depth = 1
        while shares:
            in_flight.append((shares, self._executor.submit(SchedulerOutput(tuple(shares)))))
            if len(in_flight) > MOST_IN_FLIGHT:
                take_in()
            going_on = [share.seq_id for share in shares if depths.get(share.seq_id, 0) > depth]
            shares, depth = [self._share(seq_id, 1, 1) for seq_id in going_on], depth + 1
        while in_flight:
            take_in()
        return guesses

    def _share(self, seq_id: int, num_new: int, num_draws: int) -> Share:
        """The next tokens of a sequence; without more, the token that was drawn last and is on the device."""
        draft = self._drafts[seq_id]
        start, end = draft.num_cached, draft.num_cached + num_new
        first, needed = draft.num_sent, -(-end // self._block_size)
        draft.num_cached, draft.num_sent = end, max(first, needed)
        return Share(
            seq_id, draft.row, start, num_new, no_tokens(), tuple(draft.blocks[first:needed]), first, num_draws, None
        )


def how_to_draw(spec: DrawSpec) -> DrawSpec:
    """The noise and the filters of a sequence, without what depends on the tokens so far: guesses may be wrong, and stay."""
    return DrawSpec(spec.seed, spec.temperature, spec.top_k, spec.top_p, spec.min_p)
