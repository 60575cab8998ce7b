"""The proposers by name, in the real engine: the text is plain decoding's, and where drafts do not pay there are none."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from folovllm import LLM, SamplingParams
from folovllm.config import EngineConfig
from folovllm.executor.abstract import Pending
from folovllm.setup import set_up
from folovllm.spec_decode.measure import Timer, measure_drafting
from folovllm.spec_decode.ngram import NgramProposer
from folovllm.spec_decode.policy import AdaptiveLength, FixedLength, LengthPolicy, TimedSteps
from folovllm.spec_decode.proposer import CompositeProposer, RowState
from folovllm.spec_decode.suffix import SuffixProposer
from folovllm.step.schedule import SamplingSpec, SchedulerOutput
from tests.helpers import tiny_checkpoint
from tests.sequences import make_seq
from tests.x3.drafting_loop import Clock, small_scheduler
from tests.x3.engines import Anything
from tests.x3.test_choose import costs

COMMON: dict[str, Any] = {"device": "cpu", "max_model_len": 128, "max_num_seqs": 2, "use_tqdm": False}
STORY = "<|im_start|>user\nTell me a story about Lily and a red kite.<|im_end|>\n<|im_start|>assistant\n"
PROMPTS = ["Lily has a red kite. Tom has a red kite. Anna has a red", STORY]
PARAMS = [SamplingParams(temperature=t, seed=3, max_tokens=16, ignore_eos=True) for t in (0.0, 0.8)]


def answers(llm: LLM) -> list[list[int]]:
    with llm:
        outputs = llm.generate(PROMPTS, PARAMS)
    return [list(output.outputs[0].token_ids) for output in outputs]


def test_each_method_writes_the_same_text() -> None:
    plain = answers(LLM("stories-5m", **COMMON))
    for method in ("ngram", "suffix", "ngram+draft_model"):
        model = {"model": "stories-draft"} if "draft" in method else {}
        config = {"method": method, "num_speculative_tokens": 3, "adaptive": method == "ngram", **model}
        llm = LLM("stories-5m", **COMMON, speculative_config=config)
        assert answers(llm) == plain, method
        counts = llm.engine.scheduler.speculation  # type: ignore[attr-defined]
        assert isinstance(counts.policy, AdaptiveLength if method == "ngram" else FixedLength)
    assert counts.num_accepted > 0.4 * counts.num_draft_tokens, (
        "a draft that was distilled from the model agrees with it"
    )


@pytest.mark.parametrize("milestone", ["m2", "m6"])
def test_the_cost_of_steps_is_measured(milestone: str) -> None:
    config = {"method": "ngram", "num_speculative_tokens": 3}
    with LLM(str(tiny_checkpoint()), milestone=milestone, **COMMON, speculative_config=config) as llm:
        cost = llm.engine.scheduler.speculation.policy.cost  # type: ignore[attr-defined]
        assert cost.plain.widths == (1, 2)
        assert cost.verifying.widths == (1, 2, 4, 8)
        for curve in (cost.plain, cost.verifying):
            assert 0 < curve.seconds[0] <= curve.seconds[-1]


class Resting(LengthPolicy):
    """Wants no drafts, or some after every second rest; notes what it is told of steps."""

    def __init__(self, length: int) -> None:
        self.heard, self.length, self.num_asked = list[TimedSteps](), length, 0

    def lengths(self, seq_ids: Sequence[int]) -> list[int]:
        self.num_asked += 1
        length = self.length if self.num_asked % 2 == 0 else 0
        self.rest = 0 if length else 8
        return [length] * len(seq_ids)

    def observe_steps(self, steps: TimedSteps) -> None:
        self.heard.append(steps)


@pytest.mark.parametrize("length", [0, 2])
@pytest.mark.parametrize("ahead", [0, 1], ids=["in turn", "overlapped"])
def test_a_step_in_a_rest_or_behind_it_takes_its_own_time_alone(ahead: int, length: int) -> None:
    """Each step takes a second, and a draft five. Overlapped steps end in those behind them; no second is lost or counted twice."""

    class Slow(NgramProposer):
        def propose(self, state: RowState, k: int) -> list[int]:
            nonlocal now
            now += 5.0
            return super().propose(state, k)

    now, policy, under_way = 0.0, Resting(length), []
    scheduler = small_scheduler(Slow(), policy, max_num_seqs=1, clock=lambda: now)
    scheduler.add(make_seq(3, max_tokens=60))
    began = -1.0
    for _ in range(40):
        before, start = len(policy.heard), now
        under_way.append(scheduler.sequences(scheduler.schedule()))
        began = start if policy.num_asked and began < 0 else began
        if len(policy.heard) > before:
            assert sum(steps.seconds for steps in policy.heard) == start - began
        while len(under_way) > (0 if scheduler.must_wait() else ahead):
            now += 1.0
            scheduler.postprocess([(seq, [1]) for seq in under_way.pop(0)])
    if not ahead:
        assert all(steps.seconds == steps.num_steps + steps.proposing for steps in policy.heard)
        assert {steps.proposing for steps in policy.heard if steps.length} == ({5.0} if length else set())
    assert len(policy.heard) >= 4


@pytest.mark.parametrize(("method", "longest"), [("ngram", 2), ("draft_model", 2), ("draft_model", 8)])
def test_more_drafts_than_the_context_has_room_for(method: str, longest: int) -> None:
    config = {"method": method, "num_speculative_tokens": 16}
    if method == "draft_model":
        config["model"] = str(tiny_checkpoint())
    fields = {**COMMON, "max_model_len": longest, "block_size": 1}
    with LLM(str(tiny_checkpoint()), **fields, speculative_config=config) as llm:
        (output,) = llm.generate([[5] * (longest // 2)], SamplingParams(temperature=0, ignore_eos=True))
        assert len(output.outputs[0].token_ids) == longest // 2


def test_drafts_never_seem_to_save_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step with them that was quicker than the table says was timed badly, or had none."""
    monkeypatch.setattr(Timer, "drafting", lambda *_: 0.0)
    setup = set_up(EngineConfig(model=str(tiny_checkpoint()), **COMMON))
    cost = costs((1.0, 9.0), (1.0, 1.0))
    measure_drafting(SimpleNamespace(num_kv_blocks=64), setup, Anything(), 4, cost)  # type: ignore[arg-type]
    assert (cost.first_draft_token, cost.per_draft_token) == (0.0, 0.0)


def test_a_draft_has_the_vocabulary_of_its_model() -> None:
    config = {"method": "draft_model", "model": str(tiny_checkpoint())}
    with pytest.raises(ValueError, match="must have the vocabulary of its model"):
        LLM("stories-5m", **COMMON, speculative_config=config)


def test_several_are_asked_in_turn() -> None:
    class Fixed(SuffixProposer):
        def __init__(self, drafts: dict[int, list[int]]) -> None:
            super().__init__()
            self.drafts, self.asked = drafts, list[int]()

        def propose(self, state: RowState, k: int) -> list[int]:
            self.asked.append(state.seq_id)
            return self.drafts.get(state.seq_id, [])[:k]

    first, second = Fixed({1: [5, 6]}), Fixed({1: [9], 2: [7]})
    states = [RowState(i, np.array([1], np.int32), 1, SamplingSpec()) for i in (1, 2, 3)]
    assert CompositeProposer([first, second]).propose_all(states, [2, 2, 0]) == [[5, 6], [7], []]
    assert (first.asked, second.asked) == ([1, 2], [2]), "who has a draft already is not asked about again"


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_on_a_gpu(method: str) -> None:
    """In float32, so that a step's width does not decide near ties; the draft's steps are captured, too."""
    common = {**COMMON, "device": "cuda", "dtype": "float32", "gpu_memory_utilization": 0.5}
    config = {"method": method, "num_speculative_tokens": 3, "adaptive": False}
    if method == "draft_model":
        config["model"] = "stories-draft"
    plain = answers(LLM("stories-5m", **common))
    llm = LLM("stories-5m", **common, speculative_config=config)
    assert answers(llm) == plain
    counts = llm.engine.scheduler.speculation  # type: ignore[attr-defined]
    assert counts.num_draft_tokens > 0
    if method == "draft_model":
        assert counts.num_accepted > 0.4 * counts.num_draft_tokens


def test_each_step_on_a_cpu_is_charged_with_its_own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """There a step is computed as it begins, before the end of the step before it is heard of."""
    clock = Clock()
    monkeypatch.setattr("folovllm.spec_decode.measure.time.process_time", clock)
    config = {"method": "ngram", "num_speculative_tokens": 3}
    llm = LLM(str(tiny_checkpoint()), **COMMON, speculative_config=config)
    submit, heard = llm.engine.executor.submit, list[TimedSteps]()  # type: ignore[attr-defined]

    def timed(output: SchedulerOutput) -> Pending:
        clock.now += 1.0 + 0.25 * output.num_tokens
        return submit(output)

    with llm:
        policy = llm.engine.scheduler.speculation.policy  # type: ignore[attr-defined]
        monkeypatch.setattr(llm.engine.executor, "submit", timed)
        monkeypatch.setattr(policy, "observe_steps", heard.append)
        monkeypatch.setattr(policy, "lengths", lambda seq_ids: [3 * (len(heard) % 5 < 3)] * len(seq_ids))
        bias = dict.fromkeys((5, 6), 100.0)
        llm.generate([[5, 6] * 8], SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logit_bias=bias))
    assert {steps.num_draft_tokens for steps in heard} >= {0, 3}, "plain steps, and such with drafts"
    for steps in heard:
        assert steps.seconds == pytest.approx(1.25 * steps.num_steps + 0.25 * steps.num_draft_tokens)
