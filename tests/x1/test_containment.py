"""One request stops nobody: a fault at any call that concerns one request ends that request, and leaves nothing behind."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from folovllm.engine.detokenizer import IncrementalDetokenizer
from folovllm.engine.output_processor import RequestState
from folovllm.faults import Faults, RequestFailed
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
# Calls of the engine whose results a server does not use: the answer is there, and the log has the fault.
UNUSED = {"RequestState.output", "flush"}
# Of a matcher: its answer ends as one that can no longer satisfy its grammar, with "abort".
MATCHERS = {"GrammarMatcher.finish", "GrammarMatcher.accept_token", "GrammarMatcher.forced", "fill_bitmasks"}
SIDES = {
    "engine": [
        "InputProcessor.sequences", "StructuredOutputManager.add", "GrammarMatcher.copy", "GrammarMatcher.finish", "GrammarMatcher.accept_token", "GrammarMatcher.forced",
        "fill_bitmasks", "RequestState", "RequestState.output", "added", "Scheduler.add", "append", "advance", "find_stop", "flush",
        "check_stop_conditions", "keep_logprobs", "decode",
    ],
    "server": [
        "InputProcessor.process", "RequestState", "RequestState.deltas", "append", "advance", "find_stop", "flush", "add_message",
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
        is_answered = side == "engine" and victim["cache_salt"].split("|")[2] in UNUSED | MATCHERS
        assert status == (200 if is_answered else 500), (
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
    """Without a server: the request whose `stop` is "@@" fails at its third token."""

    @pytest.fixture(autouse=True)
    def failing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        find = IncrementalDetokenizer.find_stop

        def find_stop(self: IncrementalDetokenizer, stop: list[str], include: bool = False) -> str | None:
            if stop == ["@@"] and len(self.token_ids) >= 3:
                raise KeyError("injected")
            return find(self, stop, include)

        monkeypatch.setattr(IncrementalDetokenizer, "find_stop", find_stop)

    def test_the_others_get_their_outputs(self, llm: LLM) -> None:
        """Whoever steps the engine by hand learns who failed, and misses nothing that the step has of the others."""
        right = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GOOD)]
        for i, prompt in enumerate(PROMPTS):
            llm.engine.add_request(str(i), prompt, replace(GOOD, stop=["@@"] if i == 1 else []), stream=False)
        outputs, failed = list[RequestOutput](), list[str]()
        while llm.engine.has_unfinished_requests():
            try:
                outputs += llm.engine.step()
            except RequestFailed as error:
                failed += error.request_ids
                outputs += error.outputs
                assert isinstance(error.__cause__, KeyError), "what went wrong is its cause"
        assert failed == ["1"]
        assert {output.request_id: output.outputs[0].token_ids for output in outputs} == {"0": right[0], "2": right[2]}
        assert_nothing_left(llm.engine)

    def test_generate_raises_it(self, llm: LLM) -> None:
        """As ever, and the next call is served."""
        right = llm.generate(PROMPTS[:1], GOOD)[0].outputs[0].token_ids
        with pytest.raises(RequestFailed, match="generate-"):
            llm.generate(PROMPTS, replace(GOOD, stop=["@@"]))
        assert llm.generate(PROMPTS[:1], GOOD)[0].outputs[0].token_ids == right
        assert_nothing_left(llm.engine)

    def test_an_abort_whose_text_cannot_be_made(self, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        """A server's client leaves: the request ends all the same, and those that leave with it."""
        for i in range(2):
            llm.engine.add_request(str(i), PROMPTS[i], GOOD)
        output = RequestState.output
        monkeypatch.setattr(RequestState, "output", lambda self: output(self) if self.request_id == "1" else 1 // 0)
        assert [output.request_id for output in llm.engine.abort_request(["0", "1"])] == ["1"]
        assert_nothing_left(llm.engine)

    def test_half_a_request_is_not_added(self, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        """Its second answer cannot be queued: the first one leaves the queue."""
        kind = type(llm.engine.scheduler)
        add = kind.add
        monkeypatch.setattr(kind, "add", lambda self, seq: add(self, seq) if seq.index == 0 else 1 // 0)
        with pytest.raises(ZeroDivisionError):
            llm.engine.add_request("0", PROMPTS[0], replace(GOOD, n=2, temperature=1.0))
        assert not llm.engine.has_unfinished_requests()
        assert_nothing_left(llm.engine)


class TestFaults:
    def test_each_goes_on_behind_a_fault(self) -> None:
        faults, pairs, done = Faults(), [(make_seq(name=str(i)), [i]) for i in range(4)], list[int]()

        def work(rest: Iterable[tuple[Sequence, list[int]]]) -> list[Sequence]:
            for _, (i,) in rest:
                if i in (1, 2):
                    raise KeyError(i)
                done.append(i)
            return []

        assert faults.each(work, pairs) == [seq for seq, _ in pairs], "those that got tokens"
        assert done == [0, 3] and len(faults.of) == 2

    @pytest.mark.parametrize(("takes", "error"), [(0, KeyError), (0, KeyboardInterrupt), (1, KeyboardInterrupt)])
    def test_what_is_no_fault_of_a_request(self, takes: int, error: type[BaseException]) -> None:
        """Before it takes a pair it is the step's; and Ctrl-C is nobody's."""

        def work(rest: Iterable[tuple[Sequence, list[int]]]) -> list[Sequence]:
            for _ in itertools.islice(rest, takes):
                pass
            raise error

        with pytest.raises(error):
            Faults().each(work, [(make_seq(), [1])])

    def test_drafts_of_an_answer_whose_matcher_fails(self, monkeypatch: pytest.MonkeyPatch) -> None:
        manager, seq = StructuredOutputManager(tiny_tokenizer(), VOCAB_SIZE), make_seq()
        monkeypatch.setattr(GrammarMatcher, "num_allowed", lambda self, drafted: 1 // 0)
        manager._matchers[seq] = GrammarMatcher(None, [0])  # type: ignore[arg-type]
        assert manager.trim(seq, [1, 2]) == []
        assert manager.broken([seq]) == [seq]
