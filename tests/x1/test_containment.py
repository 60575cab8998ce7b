"""One request stops nobody: a fault at any call that concerns one request ends that request, and leaves nothing behind."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from folovllm.electives.structured_output.grammar_matcher import GrammarMatcher
from folovllm.electives.structured_output.manager import StructuredOutputManager
from folovllm.engine import output_processor
from folovllm.engine.no_text import NoText
from folovllm.engine.output_processor import num_visible_chars
from folovllm.llm import LLM
from folovllm.outputs import RequestOutput
from folovllm.request import Sequence
from folovllm.sampling_params import SamplingParams
from tests.helpers import VOCAB_SIZE, tiny_checkpoint, tiny_tokenizer
from tests.sequences import make_seq
from tests.workloads import assert_nothing_left

GUESSING: dict[str, Any] = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}


class PanicException(BaseException):
    """As a library in Rust raises it."""


MODES = {
    "one at a time": {"milestone": "m1", "model_impl": "native"},
    "batches": {"milestone": "m3"},
    "overlapped": {"milestone": "m6"},
    "guesses": {"milestone": "m6", **GUESSING},
}
GOOD = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PROMPTS = [[5, 6, 7] * 5, [9, 8] * 6, [3, 4, 5] * 4]


@pytest.fixture(scope="module", params=MODES)
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    with LLM(str(tiny_checkpoint()), max_model_len=64, use_tqdm=False, **MODES[request.param]) as llm:
        yield llm


class TestEngine:
    """Without a server: the output of request "1" cannot be made."""

    @pytest.fixture(autouse=True)
    def failing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        read = num_visible_chars

        def fails(seq: Sequence) -> int:
            if seq.request_id == "1" and not isinstance(seq.detokenizer, NoText):
                raise PanicException("injected")
            return read(seq)

        monkeypatch.setattr(output_processor, "num_visible_chars", fails)

    @pytest.mark.parametrize("stream", [False, True])
    def test_the_others_get_their_outputs(self, llm: LLM, stream: bool, caplog: pytest.LogCaptureFixture) -> None:
        right = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GOOD)]
        for i, prompt in enumerate(PROMPTS):
            llm.engine.add_request(str(i), prompt, GOOD, stream=stream)
        last = dict[str, RequestOutput]()
        while llm.engine.has_unfinished_requests():
            last |= {output.request_id: output for output in llm.engine.step()}
        assert [last[i].outputs[0].token_ids for i in "02"] == [right[0], right[2]]
        assert last["1"].finished and last["1"].outputs[0].finish_reason == "abort"
        assert "request 1 ends" in caplog.text and "injected" in caplog.text, "the log has the cause"
        assert_nothing_left(llm.engine)

    def test_an_abort_whose_text_cannot_be_made(self, llm: LLM) -> None:
        """A server's client leaves: the request ends all the same, and those that leave with it."""
        for i in range(2):
            llm.engine.add_request(str(i), PROMPTS[i], GOOD)
        assert [output.request_id for output in llm.engine.abort_request(["0", "1"])] == ["0", "1"]
        assert_nothing_left(llm.engine)

    def test_any_other_fault_ends_the_step(self, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        """With its cause, as in vLLM."""
        monkeypatch.setattr(type(llm.engine.scheduler), "postprocess", lambda self, sampled: 1 // 0)
        llm.engine.add_request("0", PROMPTS[0], GOOD)
        with pytest.raises(ZeroDivisionError):
            for _ in range(3):
                llm.engine.step()
        llm.engine.abort_request("0")
        monkeypatch.undo()
        getattr(llm.engine.loop, "__dict__", {}).update(_in_flight=None)

    def test_half_a_request_is_not_added(self, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        """Its second answer cannot be queued: the first one leaves the queue."""
        kind = type(llm.engine.scheduler)
        add = kind.add
        monkeypatch.setattr(kind, "add", lambda self, seq: add(self, seq) if seq.index == 0 else 1 // 0)
        with pytest.raises(ZeroDivisionError):
            llm.engine.add_request("0", PROMPTS[0], replace(GOOD, n=2, temperature=1.0))
        assert not llm.engine.has_unfinished_requests()
        assert_nothing_left(llm.engine)


def test_drafts_of_an_answer_whose_grammar_cannot_be_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    manager, seq = StructuredOutputManager(tiny_tokenizer(), VOCAB_SIZE), make_seq()
    monkeypatch.setattr(GrammarMatcher, "num_allowed", lambda self, drafted: 1 // 0)
    manager._matchers[seq] = GrammarMatcher(None, [0])  # type: ignore[arg-type]
    assert manager.trim(seq, [1, 2]) == []
    assert manager.broken([seq]) == [seq]
