"""The policy in virtual time: a step costs what a table says, and texts repeat themselves or do not."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from folovllm.spec_decode.choose import StepCost
from folovllm.spec_decode.ngram import NgramProposer
from folovllm.spec_decode.policy import (
    TRUSTED,
    UNKNOWN,
    Acceptance,
    AdaptiveLength,
    FixedLength,
    LengthPolicy,
    TimedSteps,
)
from folovllm.spec_decode.proposer import Proposer, RowState
from folovllm.step.sampling_spec import SamplingSpec
from tests.x3.test_choose import FLAT, STEEP, costs


class RightByChance(Proposer):
    """Each draft token is right by a chance, as a small draft model's are."""

    def __init__(self, texts: dict[int, list[int]], chance: float) -> None:
        self._texts, self.chance, self._random = texts, chance, Random(1)

    def propose(self, state: RowState, k: int) -> list[int]:
        at = len(state.token_ids)
        return [t if self._random.random() < self.chance else -1 for t in self._texts[state.seq_id][at : at + k]]


def virtual_seconds(
    texts: dict[int, list[int]], proposer: Proposer, policy: LengthPolicy, cost: StepCost
) -> tuple[float, list[int]]:
    """The time to write all texts, and the sum of draft tokens asked for in each step, as an engine would go about it."""
    written, now, asked, resting = dict.fromkeys(texts, 1), 0.0, list[int](), 0
    tokens = {i: np.array(text, np.int32) for i, text in texts.items()}
    plain, verifying, no_draft, per_token = (
        cost.plain,
        cost.verifying,
        cost.no_draft_more,
        cost.per_draft_token,
    )  # the policy may correct its own

    while written:
        ids, num_right = list(written), 0
        chosen = [0] * len(ids) if resting else policy.lengths(ids)
        resting = 0 if any(chosen) else (resting or policy.rest + 1) - 1
        states = [RowState(i, tokens[i][: written[i]], 1, SamplingSpec()) for i in ids]
        drafts = proposer.propose_all(states, chosen)
        k = sum(map(len, drafts))
        seconds = (verifying.at(len(ids) + k) if k else plain.at(len(ids)) + no_draft * any(chosen)) + per_token * max(
            chosen
        )
        asked.append(sum(chosen))
        for seq_id, length, draft in zip(ids, chosen, drafts, strict=True):
            rest = texts[seq_id][written[seq_id] : written[seq_id] + len(draft)]
            right = next((i for i, (g, t) in enumerate(zip(draft, rest, strict=False)) if g != t), len(draft))
            if length:
                policy.observe(seq_id, len(draft), right)
            num_right += right
            written[seq_id] += right + 1
            if written[seq_id] >= len(texts[seq_id]):
                del written[seq_id]
                policy.forget(seq_id)
        policy.observe_steps(TimedSteps(seconds, 1, len(ids), k, num_right, max(chosen), 0.0, True))
        now += seconds
    return now, asked


def noise(length: int, seed: int = 0) -> list[int]:
    return [Random(seed * 10**6 + i).randrange(200) for i in range(length)]


def both(
    texts: dict[int, list[int]], cost: StepCost, proposer: Proposer | None = None, first: Acceptance = UNKNOWN
) -> tuple[float, float, list[int]]:
    """The seconds of plain decoding and with drafts, and what was asked for."""
    plain, _ = virtual_seconds(texts, NgramProposer(), FixedLength(0), cost)
    policy = AdaptiveLength(cost, 8, first)
    return plain, *virtual_seconds(texts, proposer or NgramProposer(1, 3), policy, cost)


@pytest.mark.parametrize("cost", [FLAT, STEEP])
def test_without_repetition_it_turns_itself_off(cost: StepCost) -> None:
    plain, seconds, asked = both({i: noise(600, i) for i in range(3)}, cost)
    assert seconds < 1.02 * plain
    assert sum(map(bool, asked[50:])) <= 0.05 * len(asked)


def test_on_repetition_it_drafts_far() -> None:
    plain, seconds, asked = both({0: noise(30) * 20}, FLAT)
    assert asked[-1] == 8
    assert plain > 5 * seconds


def test_it_comes_back_when_the_text_begins_to_repeat_itself() -> None:
    _, _, asked = both({0: noise(300) + noise(30, 9) * 10}, FLAT)
    assert sum(map(bool, asked[200:290])) < 9, "off while nothing repeats"
    assert asked[-1] == 8, "on again: a probe was accepted"


def test_one_sequence_repeats_and_the_other_does_not() -> None:
    plain, seconds, _ = both({0: noise(25) * 20, 1: noise(250, 5)}, FLAT)
    assert seconds < 0.6 * plain


@pytest.mark.parametrize("chance", [0.0, 0.1, 0.8])
def test_a_draft_model_is_probed_now_and_then(chance: float) -> None:
    cost = costs((1.0, 64.0), (1.0, 1.063), no_draft=0.1, per_draft_token=0.2)
    texts = {0: noise(6000)}
    plain, seconds, asked = both(texts, cost, RightByChance(texts, chance), TRUSTED)
    if chance < 0.5:
        assert seconds < 1.02 * plain
        assert any(asked[3000:]), "it keeps looking whether drafts have become better"
    else:
        assert plain > 1.5 * seconds


def test_a_probe_finds_out_that_drafts_have_become_better() -> None:
    cost = costs((1.0, 64.0), (1.0, 1.063), no_draft=0.1, per_draft_token=0.1)
    texts = {0: noise(3000)}
    proposer, policy = RightByChance(texts, 0.0), AdaptiveLength(cost, 4, TRUSTED)
    virtual_seconds({0: texts[0][:500]}, proposer, policy, cost)
    proposer.chance = 0.95
    _, asked = virtual_seconds(texts, proposer, policy, cost)
    assert asked[-1] == 4
