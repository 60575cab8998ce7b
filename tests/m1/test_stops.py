"""m1.6: when an answer is over; then the same through the engine, with text that streams."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from folovllm import LLM, SamplingParams
from folovllm.engine.stop import check_stop_conditions
from folovllm.outputs import RequestOutput
from folovllm.request import Request, Sequence, SequenceStatus
from tests.helpers import tiny_checkpoint
from tests.tiny import worked_case
from tests.workloads import run_to_end

STOPPED, LENGTH = SequenceStatus.FINISHED_STOPPED, SequenceStatus.FINISHED_LENGTH
EOS = frozenset({1, 2})


class Text:
    """Stands in for the detokenizer, and notes what it was asked."""

    def __init__(self, found: str | None = None) -> None:
        self.found, self.searches, self.skips = found, [], 0

    def find_stop(self, stop: list[str], include: bool = False) -> str | None:
        self.searches.append((list(stop), include))
        return self.found

    def skip_search(self) -> None:
        self.skips += 1


def sequence(answer: list[int], max_tokens: int = 9, found: str | None = None, **params: object) -> Sequence:
    request = Request("r", [5, 6, 1], SamplingParams(**params), max_tokens, 0, EOS)
    seq = Sequence(request, Text(found))
    for token in answer:
        seq.append_token(token)
    return seq


class TestCheckStopConditions:
    def test_a_worked_case(self) -> None:
        early = sequence([7], found="x", stop=["x"], min_tokens=2)
        cases = {
            "[7, 8]": sequence([7, 8]),
            "[7, 1], 1 is the end of text": sequence([7, 1]),
            "the same, and 2 tokens are allowed": sequence([7, 1], max_tokens=2),
            "the same, and min_tokens is 3": sequence([7, 1], min_tokens=3),
            "[7, 8], 2 fit into the context, 9 were asked for": sequence([7, 8], max_tokens=2),
            "[7, 8], 8 is in stop_token_ids": sequence([7, 8], stop_token_ids=[8]),
            "a stop string, earlier than min_tokens": early,
        }
        cases["[7, 8], 2 fit into the context, 9 were asked for"].params.max_tokens = 9
        got: dict[str, object] = {}
        for name, seq in cases.items():
            status = check_stop_conditions(seq)
            got[name] = status and [status.value, seq.stop_reason]
        got["is it skipped for good?"] = early.detokenizer.skips == 1
        answers = [None, ["stop", None], ["stop", None], None, ["length", None], ["stop", 8], None, True]
        says = "for each answer None (go on), or how it ended and its stop_reason"
        worked_case("m1.6", got, dict(zip(got, answers, strict=True)), says)

    @pytest.mark.parametrize(("answer", "fields", "ends", "reason", "says"), [
        ([7, 1], {}, STOPPED, None, "an end-of-text id ends the answer; a stop_reason is for what the request asked for"),
        ([7, 2], {}, STOPPED, None, "each of the model's end-of-text ids ends the answer"),
        ([1, 7], {}, None, None, "only the newest token counts, not those before it nor the prompt's"),
        ([7, 1], {"ignore_eos": True}, None, None, "ignore_eos: the model's end-of-text ids are tokens like others"),
        ([7, 8], {"stop_token_ids": [4, 8]}, STOPPED, 8, "a token of stop_token_ids ends the answer and is its stop_reason"),
        ([7, 0], {"stop_token_ids": [0]}, STOPPED, 0, "token 0 is a token like others, and a stop_reason"),
        ([1], {"stop_token_ids": [1], "ignore_eos": True}, STOPPED, 1, "ignore_eos does not speak of what the request names"),
        ([7, 7], {"max_tokens": 3}, None, None, "2 of 3 tokens: go on"),
        ([7, 7, 7], {"max_tokens": 3}, LENGTH, None, "3 of 3 tokens: the length ends it"),
        ([7, 7, 1], {"min_tokens": 3}, STOPPED, None, "with min_tokens generated, this one included, the other rules apply"),
    ], ids=str)  # fmt: skip
    def test_when_it_ends(self, answer: list[int], fields: Any, ends: Any, reason: int | None, says: str) -> None:
        seq = sequence(answer, **fields)
        assert check_stop_conditions(seq) is ends, says
        says = f"stop_reason is {reason}, Python's own, whatever the array holds: {says}"
        assert seq.stop_reason == reason and type(seq.stop_reason) in (int, type(None)), says

    def test_max_tokens_is_the_sequences_own(self) -> None:
        """A context that is nearly full allows fewer tokens than the request asked for."""
        seq = sequence([7, 7, 7], max_tokens=9)
        seq.params.max_tokens = 3
        assert check_stop_conditions(seq) is None, "seq.max_tokens counts, not params.max_tokens"

    @pytest.mark.parametrize("include", [False, True])
    def test_stop_strings(self, include: bool) -> None:
        seq = sequence([7], found="x", stop=["x", "y"], include_stop_str_in_output=include)
        says = "the string that the detokenizer found ends the answer and is its stop_reason"
        assert check_stop_conditions(seq) is STOPPED and seq.stop_reason == "x", says
        says = "find_stop was to be asked once, with the request's strings and its include_stop_str_in_output"
        assert seq.detokenizer.searches == [(["x", "y"], include)], says

    @pytest.mark.parametrize(("token", "why"), [(1, None), (8, 8)])
    def test_a_token_that_ends_it_comes_before_the_text(self, token: int, why: int | None) -> None:
        seq = sequence([7, token], found="x", stop=["x"], stop_token_ids=[8])
        assert check_stop_conditions(seq) is STOPPED, "the token ends the answer"
        assert seq.stop_reason == why, "rules 2 and 3 come before 4: it was the token, and the text is not cut"
        assert seq.detokenizer.searches == [], "decoding costs time"

    def test_no_stop_strings_no_text(self) -> None:
        seq = sequence([7], found="x")
        assert check_stop_conditions(seq) is None, "no stop strings, no search"
        assert seq.detokenizer.searches == [], "decoding costs time"

    def test_min_tokens_forbids_all_but_length(self) -> None:
        for answer, more in (([7, 1], {}), ([7, 8], {"stop_token_ids": [8]}), ([7, 8], {"stop": ["x"]})):
            seq = sequence(answer, found="x", min_tokens=3, **more)
            assert check_stop_conditions(seq) is None, "before min_tokens nothing but the length ends an answer"
            assert seq.stop_reason is None, "nothing ended, so there is no reason"
        assert check_stop_conditions(sequence([7, 7], max_tokens=2, min_tokens=3)) is LENGTH, "even before min_tokens"

    def test_an_early_stop_string_is_skipped_for_good(self) -> None:
        seq = sequence([7], found="x", stop=["x"], min_tokens=2)
        assert check_stop_conditions(seq) is None, "before min_tokens no stop string ends the answer"
        says = "skip_search was to be called once and find_stop not at all"
        assert seq.detokenizer.skips == 1 and not seq.detokenizer.searches, says
        assert check_stop_conditions(late := sequence([7, 7], found="x", stop=["x"], min_tokens=2)) is STOPPED, (
            "min_tokens is reached: the string is searched"
        )
        assert late.detokenizer.skips == 0, "min_tokens is reached: nothing is skipped any more"

    def test_no_text_for_min_tokens_alone(self) -> None:
        seq = sequence([7], min_tokens=2)
        assert check_stop_conditions(seq) is None, "before min_tokens: go on"
        assert seq.detokenizer.skips == 0, "decoding costs time"


GREEDY = SamplingParams(temperature=0, max_tokens=40)
PROMPT = "Once upon a time there was"


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(str(tiny_checkpoint()), milestone="m1", use_tqdm=False)


@pytest.fixture(scope="module")
def plain(llm: LLM) -> RequestOutput:
    """What the model says if nothing stops it."""
    return llm.generate(PROMPT, GREEDY, use_tqdm=False)[0]


def stream(llm: LLM, params: SamplingParams, prompt: str = PROMPT) -> list[RequestOutput]:
    llm.engine.add_request("stream", prompt, params)
    return run_to_end(llm.engine)


class TestStopsInTheEngine:
    @pytest.mark.parametrize("include", [False, True])
    def test_a_stop_string_over_several_tokens(self, llm: LLM, plain: RequestOutput, include: bool) -> None:
        text = plain["text"]
        stop = re.search(r"[\x20-\x7e]{3}", text).group()
        outputs = stream(llm, replace(GREEDY, stop=[stop], include_stop_str_in_output=include))
        last = outputs[-1].outputs[0]
        at = text.index(stop)
        assert last.text == text[: at + len(stop) if include else at]
        assert (last.finish_reason, last.stop_reason) == ("stop", stop)
        assert "".join(o.outputs[0].delta_text for o in outputs) == last.text
        assert last.token_ids == plain["token_ids"][: len(last.token_ids)]

    def test_text_that_may_begin_a_stop_string_is_held_back(self, llm: LLM, plain: RequestOutput) -> None:
        """No text is shown that a stop string could take back, from the first token on."""
        for length in (2, 5, 9):
            end = re.search(rf"[^\ufffd]{{{length}}}", plain["text"]).group()
            shown = ""
            for output in stream(llm, replace(GREEDY, stop=[end])):
                shown += output.outputs[0].delta_text
                assert output.outputs[0].text == shown
            assert shown == plain["text"][: plain["text"].index(end)]

    def test_long_stop_string_never_met(self, llm: LLM, plain: RequestOutput) -> None:
        outputs = stream(llm, replace(GREEDY, stop=["x" * 30]))
        assert [o.outputs[0].text for o in outputs[:8]] == [""] * 8
        assert outputs[-1]["text"] == plain["text"] == "".join(o.outputs[0].delta_text for o in outputs)

    @pytest.mark.parametrize("include", [False, True])
    @pytest.mark.parametrize("kind", ["stop_token_ids", "end of text"])
    def test_the_text_of_a_token_that_stops(
        self, llm: LLM, plain: RequestOutput, include: bool, kind: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The token stays among the tokens; its text is left out, as a stop string's is, unless asked for."""
        at = next(i for i, token in enumerate(plain["token_ids"]) if llm.tokenizer.decode([token]) == "{")
        token, before = plain["token_ids"][at], plain["token_ids"][:at]
        params = replace(GREEDY, include_stop_str_in_output=include)
        if kind == "stop_token_ids":
            params = replace(params, stop_token_ids=[token])
        else:
            monkeypatch.setattr(llm.engine._processor, "eos_token_ids", frozenset({token}))
        outputs = stream(llm, params)
        answer = outputs[-1].outputs[0]
        assert answer.token_ids == [*before, token] and answer.finish_reason == "stop"
        assert answer.stop_reason == (token if kind == "stop_token_ids" else None)
        assert answer.text == llm.tokenizer.decode(answer.token_ids if include else before)
        assert "".join(o.outputs[0].delta_text for o in outputs) == answer.text

    def test_each_of_n_answers_leaves_its_stop_token_out_once(self, llm: LLM, plain: RequestOutput) -> None:
        params = SamplingParams(n=4, temperature=3.0, seed=1, max_tokens=12, stop_token_ids=list(range(0, 200, 9)))
        last = stream(llm, params)[-1].outputs
        assert len({len(answer.token_ids) for answer in last}) > 1, "they were to end at different times"
        for answer in last:
            ids = answer.token_ids[:-1] if answer.finish_reason == "stop" else answer.token_ids
            assert answer.text == llm.tokenizer.decode(ids, skip_special_tokens=True)

    def test_every_end_of_text_id_of_the_generation_config(self, plain: RequestOutput, tmp_path: Path) -> None:
        shutil.copytree(tiny_checkpoint(), tmp_path / "model")
        ids = [plain["token_ids"][6], 258]
        (tmp_path / "model/generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
        llm = LLM(str(tmp_path / "model"), milestone="m1", use_tqdm=False)
        out = llm.generate(PROMPT, GREEDY, use_tqdm=False)[0].outputs[0]
        assert out.token_ids == plain["token_ids"][: plain["token_ids"].index(ids[0]) + 1]
        assert out.finish_reason == "stop"
        ignoring = llm.generate(PROMPT, replace(GREEDY, ignore_eos=True), use_tqdm=False)[0].outputs[0]
        assert ignoring.token_ids == plain["token_ids"]
