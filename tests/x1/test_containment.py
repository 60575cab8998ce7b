"""One request stops nobody: a fault at any call that concerns one request ends that request, and leaves nothing behind."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from folovllm.engine import output_processor
from folovllm.engine.detokenizer import NoText
from folovllm.engine.output_processor import num_visible_chars
from folovllm.llm import LLM
from folovllm.outputs import RequestOutput
from folovllm.request import Sequence
from folovllm.sampling_params import SamplingParams
from folovllm.structured_output.grammar_matcher import GrammarMatcher
from folovllm.structured_output.manager import StructuredOutputManager
from tests.helpers import VOCAB_SIZE, tiny_checkpoint, tiny_tokenizer
from tests.sequences import make_seq
from tests.workloads import assert_nothing_left
from tests.x1 import faulty
from tests.x1.background import Background, events_in, served

GUESSING: dict[str, Any] = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}
STORY = {"prompt": "Once upon a time", "temperature": 0, "max_tokens": 16, "ignore_eos": True}
VICTIM = {
    "prompt": "Once upon a time", "temperature": 0, "max_tokens": 20, "n": 2, "stop": ["@@"], "logprobs": 1,
    "structured_outputs": {"regex": "[a-z]{3,9}( the cat sat on the mat){2}"},
}  # fmt: skip
# Where the answer ends with finish_reason "abort", or is whole because a server does not use what failed; the log has the fault.
ABORTED = {
    "GrammarMatcher.finish", "GrammarMatcher.accept_token", "GrammarMatcher.forced", "fill_bitmasks", "flush",
}  # fmt: skip
SIDES = {
    "engine": [
        "InputProcessor.sequences", "StructuredOutputManager.add", "GrammarMatcher.copy", "GrammarMatcher.finish", "GrammarMatcher.accept_token", "GrammarMatcher.forced",
        "fill_bitmasks", "RequestState", "added", "Scheduler.add", "flush", "decode",
    ],
    "server": [
        "InputProcessor.process", "RequestState", "deltas", "append", "advance", "find_stop", "flush", "add_message",
        "Stream.feed", "Stream.check", "Counters.record_start", "with_text",
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def server() -> Iterator[Background]:
    """Its engine is in a thread, at the other end of a socket as one in a process is."""
    with pytest.MonkeyPatch.context() as patch:
        faulty.install(patch.setattr)
        yield from served(model=str(tiny_checkpoint()), max_model_len=256, max_num_seqs=8, **GUESSING)


def ask(server: Background, fields: dict[str, Any]) -> tuple[int, str]:
    """The status of an answer, and the text or the error's message. A stream's error is its status, too."""
    status, said = server.ask("/v1/completions", fields)
    events = events_in(said) if isinstance(said, str) else [said]
    for event in events:
        if "error" in event:
            return (500 if event["error"]["type"] == "server_error" else 400), event["error"]["message"]
    assert isinstance(said, dict) or said.endswith("data: [DONE]\n\n"), "a stream ends with its last event"
    return status, "".join(choice["text"] for event in events for choice in event["choices"] if not choice["index"])


@pytest.mark.parametrize("side", SIDES)
def test_a_fault_at_one_request(server: Background, side: str) -> None:
    """Whole answers and streams that fail at all these calls, and between them others, which get their own texts."""
    right = ask(server, STORY)
    errors = itertools.cycle(faulty.ERRORS)
    victims = [
        VICTIM | {"stream": stream, "cache_salt": f"fault|{side}|{name}|{error}"}
        for (name, stream), error in zip(itertools.product(SIDES[side], [False, True]), errors, strict=False)
    ]
    mixed = [
        fields for whole, stream in zip(victims[::2], victims[1::2], strict=True) for fields in (whole, STORY, stream)
    ]
    with ThreadPoolExecutor(6) as clients:
        answers = list(clients.map(lambda fields: ask(server, fields), mixed))
    assert set(answers[1::3]) == {right}, "who did nothing wrong is answered as ever"
    del answers[1::3]
    for victim, (status, said) in zip(victims, answers, strict=True):
        is_aborted = side == "engine" and victim["cache_salt"].split("|")[2] in ABORTED
        assert status == (200 if is_aborted else 500), (
            f"{victim['cache_salt']} is the server's own fault: {status} {said}"
        )
    server.wait_until_idle()


def test_nothing_is_left(server: Background) -> None:
    """A healthy request is answered after all of these, and the server says that it is well."""
    assert ask(server, VICTIM)[0] == 200, "the victim itself is a good request"
    assert server.ask("/health")[0] == 200
    server.wait_until_idle()


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
                raise faulty.PanicException("injected")
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
