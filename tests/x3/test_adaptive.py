"""The proposers by name, in the real engine: the text is plain decoding's, and where drafts do not pay there are none."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from folovllm import LLM, SamplingParams
from folovllm.config import EngineConfig
from folovllm.electives.spec_decode import extension
from folovllm.electives.spec_decode.choose import Curve, StepCost
from folovllm.electives.spec_decode.measure import Timer, measure_drafting
from folovllm.electives.spec_decode.policy import AdaptiveLength, LengthPolicy
from folovllm.electives.spec_decode.proposer import CompositeProposer, RowState
from folovllm.electives.spec_decode.suffix import SuffixProposer
from folovllm.engine.setup import set_up
from folovllm.step.schedule import SamplingSpec
from tests.helpers import tiny_checkpoint
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
        counts = llm.engine.scheduler.speculation
        assert isinstance(counts.policy, AdaptiveLength if method == "ngram" else LengthPolicy)
    assert counts.num_accepted > 0.4 * counts.num_draft_tokens, "a distilled draft agrees with its model"


@pytest.mark.parametrize("wait", [0.0, 5.0])
def test_what_was_timed_at_the_start_changes_no_text(monkeypatch: pytest.MonkeyPatch, wait: float) -> None:
    """Drafts seem to be free, or never to pay: other steps verify other drafts, and all write what plain decoding writes."""
    plain = answers(LLM("stories-5m", **COMMON))
    cost = StepCost(Curve((1.0, 64.0), (1.0, 1.0)), wait)
    monkeypatch.setattr(extension, "measure_steps", lambda *_: cost)
    llm = LLM("stories-5m", **COMMON, speculative_config={"method": "ngram", "num_speculative_tokens": 3})
    assert answers(llm) == plain
    assert llm.engine.scheduler.speculation.policy.cost is cost


@pytest.mark.parametrize("milestone", ["m2", "m6"])
def test_the_cost_of_steps_is_measured(milestone: str) -> None:
    config = {"method": "ngram", "num_speculative_tokens": 3}
    with LLM(str(tiny_checkpoint()), milestone=milestone, **COMMON, speculative_config=config) as llm:
        cost = llm.engine.scheduler.speculation.policy.cost
        assert cost.curve.widths[:-1].tolist() == [1, 2, 4, 8]
        assert 0 < cost.of_plain(1) <= cost.of_plain(8) <= cost.of_verifying(8)


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
    measure_drafting(SimpleNamespace(num_kv_blocks=64), setup, Anything(), 4, cost)
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
    counts = llm.engine.scheduler.speculation
    assert counts.num_draft_tokens > 0
    if method == "draft_model":
        assert counts.num_accepted > 0.4 * counts.num_draft_tokens
