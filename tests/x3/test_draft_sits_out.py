"""A small model that knows no grammars is not asked where these cut its drafts away; what it does not do costs nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as SequenceOf
from types import SimpleNamespace
from typing import Any

import pytest

from folovllm.electives.spec_decode.draft_model import DraftModel
from folovllm.request import Sequence
from folovllm.step.schedule import SchedulerOutput, StepResult
from tests.x3.drafting_loop import Clock
from tests.x3.test_two_percent import MS, Served, copied, story

A_RUN, A_STEP = 0.25 * MS, 0.03 * MS  # of the small model: to start it, and each step


class Writer:
    """The small model: it writes what the answers will say in `knows`, and else a token that none of them has."""

    num_kv_blocks, placeholder_ids = 10_000, None

    def __init__(self, clock: Clock) -> None:
        self.clock, self.texts, self.knows = clock, dict[int, list[int]](), set[int]()
        self.runs: Counter[int] = Counter()  # by seq_id
        self._sampled: list[StepResult] = []

    def submit(self, output: SchedulerOutput) -> None:
        self.clock.now += A_STEP

    def submit_steps(self, steps: SequenceOf[SchedulerOutput]) -> Writer:
        self.clock.now += A_RUN + A_STEP * len(steps)
        self.runs.update(scheduled.seq_id for scheduled in steps[0].scheduled_seqs)
        self._sampled = [StepResult([[self.token(s.seq_id, s.end)] for s in step.scheduled_seqs], {}) for step in steps]
        return self

    def token(self, seq_id: int, position: int) -> int:
        text = self.texts[seq_id]
        return text[position] if seq_id in self.knows and position < len(text) else 99

    def wait(self) -> list[StepResult]:
        return self._sampled


class Drafting(Served):
    """An engine with a small model; of some answers the grammar forces a part, and cuts away all that is not what it wants."""

    def __init__(self, max_num_seqs: int, forces: bool = False, **how: Any) -> None:
        self.writer, self.forces = Writer(clock := Clock()), forces
        sizes: Any = SimpleNamespace(max_num_batched_tokens=2**16, max_model_len=2**16, block_size=16)
        sizes.max_num_seqs = max_num_seqs
        draft = DraftModel(self.writer, sizes)
        super().__init__(max_num_seqs, grammars=True, clock=clock, draft=draft, **how)
        self.writer.texts, add = self.texts, self.scheduler.add

        def note(seq: Sequence) -> None:
            add(seq)
            if self.is_known(self.texts[seq.seq_id]):
                self.writer.knows.add(seq.seq_id)

        self.scheduler.add = note
        self.policy.cost.first_draft_token, self.policy.cost.per_draft_token = A_RUN, A_STEP

    def is_known(self, text: list[int]) -> bool:
        """Whether the small model knows an answer when it is asked for."""
        return False

    def forced(self, seq: Sequence, most: int) -> list[int]:
        return super().forced(seq, most) if self.forces else []

    def trim(self, seq: Sequence, drafts: list[int]) -> list[int]:
        if seq.params.structured_outputs is None:
            return drafts
        text = self.texts[seq.seq_id][seq.num_tokens :]
        return drafts[: next((i for i, (g, t) in enumerate(zip(drafts, text, strict=False)) if g != t), len(text))]


def plain_seconds(texts: list[list[int]], turns: int) -> float:
    """The seconds without drafts: each turn takes as long as the first."""
    return turns * Served(len(texts), grammars=True).serve(texts, 45)


@pytest.mark.parametrize("batch", [1, 8])
def test_where_grammars_cut_every_draft_token_away_nothing_is_lost(batch: int) -> None:
    texts, drafting = [story(i, 245) for i in range(batch)], Drafting(batch)
    seconds = sum(drafting.serve(texts, 45) for _ in range(8))
    assert not drafting.speculation.num_accepted
    assert seconds < 1.02 * plain_seconds(texts, 8)


@pytest.mark.parametrize(("batch", "gain"), [(1, 1.5), (16, 1.3)])
def test_what_a_grammar_forces_pays_for_itself(batch: int, gain: float) -> None:
    texts, drafting = [copied(i, 320) for i in range(batch)], Drafting(batch, forces=True)
    seconds = sum(drafting.serve(texts, 45) for _ in range(3))
    assert plain_seconds(texts, 3) > gain * seconds
    runs = [drafting.writer.runs[seq_id] for seq_id in sorted(drafting.writer.runs)]
    assert max(runs) <= 7, "of 275 steps"


def test_others_in_the_batch_are_still_served() -> None:
    """One answer has a grammar that rules out what the small model writes, and it writes what the other one says."""
    drafting = Drafting(2)
    texts = [story(1, 400), story(2, 400)]
    drafting.is_known = lambda text: text is texts[1]
    drafting.serve(texts, 45, without_grammar=[1])
    (other,) = drafting.writer.knows
    assert drafting.speculation.num_accepted > 200 and drafting.writer.runs[other] > 15


class Knowing(Drafting):
    """The small model knows all texts; no answer has a grammar."""

    def __init__(self, max_num_seqs: int) -> None:
        super().__init__(max_num_seqs)
        self.grammar = 0.0

    def is_known(self, text: list[int]) -> bool:
        return True


def without_grammars(drafting: Served, num_seqs: int, turns: int) -> list[float]:
    """The seconds of each turn: stories, no two of them the same."""
    return [drafting.serve([story(100 * turn + i, 245) for i in range(num_seqs)], 45) for turn in range(turns)]


@pytest.mark.parametrize(("batch", "gain"), [(1, 1.8), (16, 1.5)])
def test_a_good_small_model_is_found_with_the_first_request_and_serves_all_others(batch: int, gain: float) -> None:
    drafting = Knowing(batch)
    (plain,), seconds = without_grammars(Served(batch), batch, 1), without_grammars(drafting, batch, 3)
    assert all(plain > gain * other for other in seconds)
    assert seconds[-1] < 1.05 * seconds[0]
    assert drafting.speculation.num_accepted > 0.8 * 3 * batch * 200
