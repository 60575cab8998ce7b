"""Answers of a given form: valid for every schema, the same at every milestone, and nobody beside them notices."""

from __future__ import annotations

import asyncio
import functools
import json
import random
import re
import sys
from collections.abc import Iterator
from functools import cache
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from folovllm.config import EngineConfig
from folovllm.electives.server.async_engine import AsyncEngine
from folovllm.electives.structured_output.guidance import GuidanceGrammar, check_grammar, make_tokenizer, tokenizer_json
from folovllm.electives.structured_output.manager import StructuredOutputManager
from folovllm.electives.structured_output.masked_executor import manager_of
from folovllm.electives.structured_output.params import StructuredOutputsParams
from folovllm.electives.structured_output.vocabulary import read_vocabulary
from folovllm.engine.llm_engine import make_engine
from folovllm.engine.overlap import OverlappedEngine
from folovllm.llm import LLM
from folovllm.outputs import RequestOutput
from folovllm.sample.sampling_row import mask_width
from folovllm.sampling_params import SamplingParams
from tests.helpers import prompts, tiny_checkpoint, tiny_tokenizer
from tests.m6.test_overlap import assert_clean
from tests.sequences import make_seq
from tests.x1.schemas import random_object

NAME_AND_AGE = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
KEYWORDS = ["type", "properties", "required", "items", "enum", "const", "anyOf", "$ref", "pattern", "minimum", "not"]
NO_SCHEMAS = st.recursive(
    st.sampled_from(["string", "integer", "object", "array", "#/x", "a+", "(", 5, -1, 2**70, 0.5, None, True]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYWORDS), inner, max_size=4),
    max_leaves=10,
).filter(lambda schema: isinstance(schema, dict))
NO_PATTERNS = st.text("ab(){}[]|*+?.\\^$-,09é\n", min_size=1, max_size=20)
SYMBOLS = ["start: ", "x", '"a"', "|", "(", ")", "*", "\n", "root ::= ", "%json", "{}", "/a/", "[a-z]", "{1,"]
NO_GRAMMARS = st.lists(st.sampled_from(SYMBOLS), min_size=1, max_size=12).map(
    lambda pieces: {"grammar": "".join(pieces)}
)
OBJECT = {"type": "object"}
NO_JSON: list[Any] = [0, "", '{"maximum": -Infinity}', "[" * 5000, {"const": float("nan")}, {"enum": [{1, 2}]}]
WRONG = [("regex", False), ("choice", False), ("grammar", 0), ("json_object", 0), ("whitespace_pattern", False)]
WRONG += [
    ("strict", None),
    ("strict", 1),
    ("strict", "yes"),
    ("disable_any_whitespace", 5),
    ("after", []),
    ("regex", ""),
]
NESTED: list[Any] = functools.reduce(lambda inner, _: [inner], range(5000), list[Any]())
FREE = SamplingParams(seed=2, max_tokens=30, ignore_eos=True)


def formed(seed: int = 1, max_tokens: int = 90, **fields: Any) -> SamplingParams:
    kinds = ("json", "regex", "choice", "grammar", "json_object", "after")
    form = StructuredOutputsParams(**{name: fields.pop(name) for name in kinds if name in fields})
    return SamplingParams(seed=seed, max_tokens=max_tokens, structured_outputs=form, **fields)


MIXED = [  # every kind of form, and free answers between them
    formed(json=NAME_AND_AGE),
    FREE,
    formed(choice=["yes", "no way"]),
    formed(regex="[a-c]{3,9}", n=3),
    SamplingParams(temperature=0, max_tokens=25, ignore_eos=True),
    formed(grammar='start: "x" ("y" | "z"){2,20}', temperature=0),
    formed(json=NAME_AND_AGE, presence_penalty=0.5, repetition_penalty=1.2, top_k=20, top_p=0.9, logprobs=2),
    SamplingParams(seed=5, max_tokens=30, ignore_eos=True, top_p=0.8, frequency_penalty=1.0),
    formed(regex="[a-z]{1,30}", min_tokens=12, temperature=2.0),
    formed(json=NAME_AND_AGE, max_tokens=7),
    formed(regex="[a-e]{20}", stop=["c"]),
]
INPUTS = [[int(t) for t in prompt] for prompt in prompts([3 + 5 * i for i in range(len(MIXED))])]


@cache
def bytes_of() -> Any:
    return read_vocabulary(tiny_tokenizer()).bytes_of


@cache
def library_tokenizer() -> Any:
    return make_tokenizer(tokenizer_json(tiny_tokenizer()), len(tiny_tokenizer()), [0])


def engine(milestone: str | None = None, **overrides: Any) -> LLM:
    fields = {"max_model_len": 200, "device": "cpu", "use_tqdm": False, "max_num_seqs": 16} | overrides
    if milestone is not None:
        fields["milestone"] = milestone
        fields = {k: v for k, v in fields.items() if milestone != "m1" or k != "max_num_seqs"}
    return LLM(str(tiny_checkpoint()), **fields)


def answers(llm: LLM, params: list[SamplingParams] | None = None) -> list[RequestOutput]:
    with llm:
        return llm.generate(INPUTS, MIXED if params is None else params, use_tqdm=False)


def essence(outputs: list[RequestOutput]) -> list[Any]:
    return [(a.token_ids, a.text, a.finish_reason, a.stop_reason) for o in outputs for a in o.outputs]


@pytest.fixture(scope="module")
def expected() -> list[RequestOutput]:
    """What M2 answers: a step at a time, PyTorch's draw."""
    return answers(engine("m2"))


def texts(outputs: list[RequestOutput], i: int) -> list[str]:
    return [answer.text for answer in outputs[i].outputs]


def test_random_schemas() -> None:
    """At temperature 1 every answer that ends is valid, and nearly all end."""
    rng = random.Random(20)
    schemas = [random_object(rng) for _ in range(40)]
    asked = [SamplingParams(seed=i, max_tokens=250, structured_outputs={"json": s}) for i, s in enumerate(schemas)]  # type: ignore[arg-type]
    with LLM(max_num_seqs=32, max_model_len=512, device="cpu", use_tqdm=False) as llm:
        outputs = [output.outputs[0] for output in llm.generate(["JSON: "] * 40, asked, use_tqdm=False)]
    ended = [(schema, out) for schema, out in zip(schemas, outputs, strict=True) if out.finish_reason == "stop"]
    assert len(ended) >= 36
    assert len({out.text for _, out in ended}) > 30, "they hardly differ"
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    for schema, out in ended:
        jsonschema.validate(json.loads(out.text), schema, cls=jsonschema.Draft202012Validator, format_checker=checker)


class TestEveryEngine:
    def test_forms_are_kept(self, expected: list[RequestOutput]) -> None:
        jsonschema.validate(json.loads(texts(expected, 0)[0]), NAME_AND_AGE)
        assert texts(expected, 2)[0] in ("yes", "no way")
        assert len(set(texts(expected, 3))) == 3 and all(re.fullmatch("[a-c]{3,9}", t) for t in texts(expected, 3))
        assert re.fullmatch("x[yz]{2,20}", texts(expected, 5)[0])
        jsonschema.validate(json.loads(texts(expected, 6)[0]), NAME_AND_AGE)
        assert re.fullmatch("[a-z]{1,30}", texts(expected, 8)[0])
        assert len(expected[8].outputs[0].token_ids) >= 12, "min_tokens"
        assert expected[9].outputs[0].finish_reason == "length"
        assert expected[10].outputs[0].stop_reason == "c" and "c" not in texts(expected, 10)[0]

    @pytest.mark.parametrize(
        "fields",
        [
            *({"milestone": milestone} for milestone in ("m1", "m3", "m4", "m5", "m6")),
            {"model_impl": "native", "milestone": "m1"},
            {"enforce_eager": True},
            {"async_scheduling": False},
            {"block_size": 4, "num_kv_blocks": 55, "max_num_batched_tokens": 9},
            {"max_num_seqs": 3, "max_num_batched_tokens": 17, "enable_prefix_caching": False},
            {"tensor_parallel_size": 2},
            pytest.param(
                {"tensor_parallel_size": 2, "async_scheduling": False, "enforce_eager": True}, marks=pytest.mark.slow
            ),
        ],
        ids=str,
    )
    def test_milestones_and_modes(
        self, expected: list[RequestOutput], fields: dict[str, Any], request: pytest.FixtureRequest
    ) -> None:
        """Eager and captured, overlapped or not, with preemption, prompts in chunks, two ranks."""
        if "tensor_parallel_size" in fields:
            request.getfixturevalue("warm")
        llm = engine(**fields)
        assert essence(answers(llm)) == essence(expected)
        if "num_kv_blocks" in fields:
            assert llm.engine.core.num_preemptions > 0

    def test_logprobs_are_the_models_own(self, expected: list[RequestOutput]) -> None:
        """Before any mask: tokens of other forms are among the most likely."""
        rows = expected[6].outputs[0].logprobs
        assert rows is not None and len(rows) == len(expected[6].outputs[0].token_ids)
        assert any(next(iter(row.values())).rank > 2 for row in rows)
        with engine("m6") as llm:
            (again,) = llm.generate(INPUTS[6], MIXED[6], use_tqdm=False)
        for mine, theirs in zip(again.outputs[0].logprobs or [], rows, strict=True):
            assert list(mine) == list(theirs)


class TestOthers:
    def test_who_is_beside_notices_nothing(self, expected: list[RequestOutput]) -> None:
        """The very same tokens as without the formed answers."""
        free = [i for i, params in enumerate(MIXED) if params.structured_outputs is None]
        for milestone in ("m2", "m6"):
            with engine(milestone) as llm:
                alone = llm.generate([INPUTS[i] for i in free], [MIXED[i] for i in free], use_tqdm=False)
            assert essence(alone) == essence([expected[i] for i in free])

    def test_plain_steps_are_as_they_were(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """No step of free answers is cut in two, and nothing is captured for it."""
        with engine("m6") as llm:
            executor = llm.engine.executor
            monkeypatch.setattr(executor, "forward", None)
            monkeypatch.setattr(StructuredOutputManager, "bitmasks", None)
            llm.generate(INPUTS[:4], FREE, use_tqdm=False)
            assert {name for _, name in executor._worker.runner._graphs._graphs} == {"_decode"}

    def test_overlap_goes_on(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A step is started before the tokens of the one before are looked at, and draws after it."""
        made = make_engine(EngineConfig(model=str(tiny_checkpoint()), device="cpu", use_tqdm=False, max_model_len=64))
        assert isinstance(made.loop, OverlappedEngine)
        happened: list[str] = []
        for owner, name in ((made.executor, "forward"), (made.executor, "sample"), (made.scheduler, "postprocess")):
            inner = getattr(owner, name)
            spy = lambda *args, name=name, inner=inner: (happened.append(name), inner(*args))[1]  # noqa: E731
            monkeypatch.setattr(owner, name, spy)
        made.add_request("a", INPUTS[0], formed(regex="[a-z]{5}"))
        made.add_request("b", INPUTS[1], FREE)
        while made.has_unfinished_requests() and len(happened) < 9:
            made.step()
        made.close()
        ahead = ["forward", "sample"]
        assert happened[:8] == [*ahead, *ahead, "postprocess", *ahead, "postprocess"]

    def test_arrivals_and_aborts(self) -> None:
        """Requests come and are aborted at any moment; what is left is answered as by the plain loop."""

        def run(milestone: str, **overrides: Any) -> tuple[dict[str, Any], LLM]:
            rng, llm, done = random.Random(3), engine(milestone, **overrides), {}
            for step in range(400):
                if step < 80 and rng.random() < 0.3:
                    params = rng.choice(MIXED)
                    llm.engine.add_request(f"r{step}", INPUTS[rng.randrange(len(INPUTS))], params, stream=False)
                if rng.random() < 0.04 and llm.engine.core.output_processor.requests:
                    gone = [f"r{n}" for n in rng.sample(range(80), 27)]
                    llm.engine.abort_request(gone)
                done |= {output.request_id: output for output in llm.engine.step()}
                if step > 80 and not llm.engine.has_unfinished_requests():
                    break
            assert not llm.engine.has_unfinished_requests()
            return done, llm

        plain, other = run("m2")
        other.close()
        for fields in ({}, {"block_size": 4, "num_kv_blocks": 60, "max_num_batched_tokens": 11}):
            done, llm = run("m6", **fields)
            common = [id_ for id_ in done if id_ in plain]
            assert len(common) > 10
            assert essence([done[id_] for id_ in common]) == essence([plain[id_] for id_ in common])
            assert_clean(llm.engine)
            assert not manager_of(llm.engine)._matchers
            llm.close()


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with engine() as made:
        yield made


def one(llm: LLM, **fields: Any) -> Any:
    return llm.generate(INPUTS[0], formed(**fields), use_tqdm=False)[0].outputs[0]


class TestCorners:
    def test_only_the_end_follows_the_end(self, llm: LLM) -> None:
        """Ends are repeated where tokens are missing; they are no text."""
        answer = one(llm, choice=["a"], min_tokens=5)
        assert (answer.text, len(answer.token_ids), answer.finish_reason) == ("a", 5, "stop")
        assert set(answer.token_ids[1:]) <= {256, 258}
        endless = one(llm, choice=["a"], ignore_eos=True, max_tokens=9)
        assert (endless.text, endless.finish_reason) == ("a", "length")

    def test_a_token_of_the_requests_own_ends_it(self, llm: LLM) -> None:
        stop = llm.tokenizer.encode("!")[0]
        answer = one(llm, choice=["ab"], stop_token_ids=[stop], ignore_eos=True)
        assert (answer.text, answer.stop_reason) == ("ab", stop) or answer.token_ids[2:] != [stop]
        assert answer.text == "ab"

    @pytest.mark.parametrize("milestone", ["m2", "m5", "m6"])
    def test_what_was_drawn_before_it_led_nowhere_is_kept(self, milestone: str) -> None:
        """Whichever step finds that no token is left: those that came before are part of the answer."""
        with engine(milestone) as llm:
            a, b = llm.tokenizer.encode("ab")
            nowhere = {"regex": "ab[x-z]{9}", "allowed_token_ids": [a, b]}
            dead, stopped, _, alive = llm.generate(
                INPUTS[:4],
                [formed(**nowhere), formed(**nowhere, stop=["b"]), formed(regex="[a-c]{30}"), FREE],
                use_tqdm=False,
            )
        answer = dead.outputs[0]
        assert (answer.token_ids, answer.text, answer.finish_reason) == ([a, b], "ab", "abort")
        assert (stopped.outputs[0].text, stopped.outputs[0].finish_reason) == ("a", "stop"), "it had ended by then"
        assert len(alive.outputs[0].token_ids) == 30

    @pytest.mark.parametrize("fields", [{}, {"max_num_batched_tokens": 4}, {"milestone": "m2"}], ids=str)
    def test_the_prompt_of_what_is_given_up_was_scored(self, fields: dict[str, Any]) -> None:
        """In the very step that finds that nothing can be drawn, or in one before it; with a server too."""
        params = formed(regex="[x-z]{9}", allowed_token_ids=[64, 65], prompt_logprobs=0)
        with engine(**fields) as llm:
            (dead,) = llm.generate(INPUTS[1], params, use_tqdm=False)
        assert dead.outputs[0].finish_reason == "abort"
        assert dead.prompt_logprobs is not None and len(dead.prompt_logprobs) == len(INPUTS[1])

        async def last() -> RequestOutput:
            common = {"max_model_len": 200, "device": "cpu", "use_tqdm": False, "max_num_seqs": 16}
            async with AsyncEngine(str(tiny_checkpoint()), **(common | fields)) as served:
                return [output async for output in served.generate(INPUTS[1], params)][-1]

        assert asyncio.run(last()).prompt_logprobs == dead.prompt_logprobs

    def test_from_behind_a_text(self) -> None:
        """Free up to it, wherever tokens cut it; in that form from there."""
        tags = [" was", "as a"]
        params = [formed(regex="[0-9]{4}", after=after, temperature=0) for after in tags]
        with LLM(max_model_len=512, device="cpu", use_tqdm=False) as llm:
            outputs = llm.generate(["Once upon a time, there"] * 2, params, use_tqdm=False)
        for after, output in zip(tags, outputs, strict=True):
            thought, tag, number = output["text"].partition(after)
            assert tag and re.fullmatch("[^0-9]* ?[0-9]{4}", thought + number), output["text"]

    @pytest.mark.parametrize("choices", [["é", "ü"], ["a", "ab", "abc"], ["x" * 40], ['say "no"\n', "🙂"]])
    def test_choices(self, llm: LLM, choices: list[str]) -> None:
        assert {one(llm, choice=choices, seed=seed).text for seed in range(4)} <= set(choices)


class TestErrors:
    def test_an_engine_refuses(self, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        """What is no grammar, no form, or a form in a model without an end. It is as it was then."""
        with pytest.raises(ValueError, match="structured_outputs is a StructuredOutputsParams"):
            SamplingParams(structured_outputs=5)
        with pytest.raises(ValueError, match="regex that cannot be used"):
            one(llm, regex="(a")
        monkeypatch.setattr(llm.engine._processor, "eos_token_ids", frozenset())
        with pytest.raises(ValueError, match="give stop_token_ids"):
            one(llm, regex="a")
        assert not llm.engine.has_unfinished_requests()

    @pytest.mark.parametrize(
        ("fields", "says"),
        [
            ({}, "exactly one of json, regex, choice, grammar, json_object: nothing is given"),
            ({"regex": "a", "choice": ["a"]}, "regex and choice are given"),
            ({"choice": []}, "at least one"),
            ({"choice": ["a", ""]}, "none of them empty"),
            ({"choice": "abc"}, "list of texts"),
            ({"choice": ["\ud800"]}, "half a character"),
            *(({"json": OBJECT, name: value}, name) for name, value in WRONG),
            ({"choice": {"a": 1}}, "choice must be a list"),
            ({"regex": "a", "whitespace_pattern": 3}, "whitespace_pattern must be a text"),
            *(({"json": schema}, "json must be a JSON schema|json must be a text") for schema in NO_JSON),
            *(({field: NESTED}, field) for field in ("choice", "json", "regex")),
            ({"json": "{"}, "must be a JSON schema"),
            ({"json": "[1]"}, "must be a JSON schema, an object"),
            ({"regex": "a" * (2**16 + 1)}, "take a simpler form"),
            ({"json": {"enum": ["a" * 2**16]}}, "more than 65536 characters"),
            ({"choice": ["a" * 1001]}, "1000 a text"),
            ({"choice": ["a" * 999] * 66}, "more than 65536 characters"),
            ({"regex": "a", "structural_tag": "{}"}, "structural_tag=.* is not supported"),
            ({"regex": "a", "disable_additional_properties": True}, "additionalProperties"),
        ],
    )
    def test_what_cannot_be(self, fields: dict[str, Any], says: str) -> None:
        with pytest.raises(ValueError, match=says):
            StructuredOutputsParams(**fields)

    @settings(max_examples=100, suppress_health_check=list(HealthCheck))
    @given(form=st.one_of(NO_SCHEMAS.map(lambda s: {"json": s}), NO_PATTERNS.map(lambda s: {"regex": s}), NO_GRAMMARS))
    def test_nonsense(self, form: dict[str, Any]) -> None:
        """Whatever is asked for: it is taken, or refused in a sentence."""
        try:
            check_grammar(StructuredOutputsParams(**form), library_tokenizer())
        except ValueError as error:
            assert len(str(error)) > 10

    def test_without_the_library(self, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        """A sentence says what to install; a choice needs nothing."""
        monkeypatch.setitem(sys.modules, "llguidance", None)
        with pytest.raises(ValueError, match="pip install"):
            one(llm, regex="a")
        assert one(llm, choice=["a", "b"]).text in ("a", "b")

    def test_a_tokenizer_that_cannot_be_read(self, caplog: pytest.LogCaptureFixture) -> None:
        """An engine that is prepared for forms starts all the same, and says so once; a request is told."""
        manager = StructuredOutputManager(object(), 259)  # type: ignore[arg-type]
        manager.prepare({1})
        assert "cannot be had with this tokenizer" in caplog.text
        seq = make_seq(structured_outputs={"regex": "a"})
        seq.eos_token_ids = frozenset({1})
        with pytest.raises(ValueError, match="cannot be had with this tokenizer"):
            manager.add([seq])
        seq = make_seq(structured_outputs={"choice": ["a"]}, stop_token_ids=[3])
        with pytest.raises(ValueError, match="tokens stand for bytes"):
            manager.add([seq])


OBJECT_OF = {"type": "object", "additionalProperties": False}
ONE_NAME = {"properties": {"a": {"const": 1}}, "patternProperties": {"^a$": {"type": "integer"}}}
LEAF = {**OBJECT_OF, "properties": {"leaf": {"const": 1}}, "required": ["leaf"]}
NODE = {"anyOf": [{"$ref": "#/$defs/tree"}, LEAF]}
TREE = {**OBJECT_OF, "properties": {"left": NODE, "right": NODE}, "required": ["left", "right"]}
B, ID, A = {"b": {"enum": [3, 7]}}, {"id": {"type": "integer"}}, {"a": {"const": 1}}
ENDS: list[dict[str, Any]] = [
    {**OBJECT_OF, "properties": B, "patternProperties": {"^b": {"maximum": 5}}, "required": ["b"]},
    {"type": "object", "properties": A, "patternProperties": {"^(?s:.*)$": {"enum": [1, 2]}}},
    {**OBJECT_OF, "properties": ID, "patternProperties": {"^x-": {"type": "boolean"}}},
    {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
    {"type": "object", "properties": A, "required": ["a", "b"], "minProperties": 3, "maxProperties": 3},
    {**OBJECT_OF, "properties": {"next": {"$ref": "#"}, **A}, "required": ["a"]},
    {"$defs": {"tree": TREE}, "$ref": "#/$defs/tree"},
]
NOWHERE, PATTERNS = "an answer may come to where it finds no end", "patternProperties forbids names"
TWICE, EXACT = "one name could be given several times", "beyond those that are kept exactly"
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"json": {"type": "nope"}}, "JSON schema that cannot be used: Invalid type"),
    ({"json": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
    ({"json": {"$ref": "#/nowhere"}}, "cannot be used"),
    ({"json": False}, "no document is valid"),
    ({"json": {"type": "integer", "minimum": 5, "maximum": 3}}, "minimum"),
    ({"regex": "(?=a)b"}, "look-around"),
    ({"grammar": "start: nothing"}, "grammar that cannot be used"),
    ({"grammar": "root ::= ("}, "grammar that cannot be used"),
    ({"grammar": 'start: "a" X\nX: /a/ & /b/'}, NOWHERE),
    ({"grammar": 'start: "x"{300} /[^\\s\\S]/'}, NOWHERE),
    ({"grammar": 'start: p::0\np::_ : "a" p::incr(_) %if lt(_, 300)'}, NOWHERE),
    ({"grammar": 'start : "b" | x\n  x : "a" x'}, NOWHERE),
    ({"grammar": 'start: x y\nx: "a" x\ny: %lark {\n start: x\n x: "c"{2}\n}'}, NOWHERE),
    ({"grammar": 'start: "a" %json {"$ref": "#"}'}, NOWHERE),
    ({"grammar": 'root ::= "(" root ")"'}, NOWHERE),
    ({"grammar": 'root ::= a\na ::= ([a-z] a)+ | "x" a'}, NOWHERE),
    ({"json": {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}}, NOWHERE),
    ({"json": {"type": "object", "patternProperties": {"^a": {"$ref": "#"}}, "required": ["a"]}}, NOWHERE),
    ({"json": {"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}]}}}}, "no text matches it"),
    ({"json": {**OBJECT_OF, **ONE_NAME}}, NOWHERE),
    ({"json": {**OBJECT_OF, **ONE_NAME, "required": ["a"], "minProperties": 2}}, NOWHERE),
    ({"json": {**OBJECT_OF, "patternProperties": {"^(a|b)$": {"enum": [1, 2]}}, "required": ["a", "b"]}}, NOWHERE),
    ({"json": {"type": "array", "items": {**OBJECT_OF, **ONE_NAME}, "minItems": 2}}, NOWHERE),
    ({"json": {**OBJECT_OF, "patternProperties": {"^a": False, "^b$": {"const": 1}}}}, PATTERNS),
    ({"json": {"type": "object", "patternProperties": {"f.*o": False}}}, PATTERNS),
    ({"json": {**OBJECT_OF, "patternProperties": {"^a": {"const": 1}, "^.$": {}}}}, "not disjoint"),
    ({"json": OBJECT, "whitespace_pattern": "((( *)*)*)*"}, "too many expressions"),
    ({"regex": r"ab[^\s\S]"}, "no text matches it"),
    ({"grammar": 'start: "x" a\na: a'}, NOWHERE),
    ({"json": {"$ref": "#"}}, "no text matches it"),
    ({"json": {"type": "string", "minLength": 5, "maxLength": 3}}, "Unsatisfiable"),
    ({"json": {**OBJECT_OF, "patternProperties": {"^a$": {}}, "minProperties": 2}}, TWICE),
    ({"json": {"patternProperties": {"^a": {}}, "required": ["ab"], "minProperties": 3}}, "2 of them .* strict=False"),
    ({"json": {"properties": {"a": False, "b": False}, "minProperties": 3}}, "2 of them in required"),
    ({"grammar": 'start: %json {"minProperties": 2}'}, TWICE),
    ({"json": {"type": "object", "properties": {f"{i}": {} for i in range(900)}}}, "max is 2000"),
    ({"grammar": 'start: "a" | b\nb: "%json {" %json {"enum": ["%json {", -9223372036854775808]}'}, "kept exactly"),
    ({"json": {"prefixItems": [{"type": "null"}], "items": [{"type": "string"}]}}, "give one of them"),
    # What would make a rewritten schema lose its bounds.
    ({"json": {"type": "integer", "required": [["a"]]}}, "required a list of names"),
    ({"json": {"type": "integer", "x-guidance": []}}, "x-guidance must be an object"),
    # Numbers that the library writes as others; some end the process in there.
    ({"json": {"const": 2**53 + 1}}, EXACT),
    ({"json": {"type": "number", "maximum": -1.5673770337500095}}, "-1.5673770337500095 is beyond"),
    ({"json": {"items": {"enum": [0.1, -(2**63)]}}}, EXACT),
    ({"json": {"type": ["integer", "string"], "enum": [-1e20]}}, EXACT),
    ({"json": {"anyOf": [{"type": "integer"}, {"enum": [{"a": [10**400]}]}]}}, EXACT),
    ({"json": {"type": "integer", "minimum": -(10**19), "maximum": 5 - 10**19}}, "-9999999999999999995 is beyond"),
    ({"json": {"type": "integer", "exclusiveMinimum": 1e19}}, "1e.19 is beyond"),
    ({"json": {"type": "integer", "minimum": 2**53 + 1, "maximum": 2**53 + 5}}, "9007199254740993 is beyond"),
    ({"json": {"type": ["integer", "null"], "exclusiveMaximum": 2**53 + 28}}, "9007199254741019 is beyond"),
    ({"json": {"patternProperties": {"a.": {"$ref": "#/$defs/d"}}, "$defs": {"d": {"enum": [-(2**63)]}}}}, EXACT),
]
ARRAY, LENIENT = {"type": "array", "items": {"const": 1}}, {"minProperties": 2, "x-guidance": {"lenient": True}}
EMBEDDED = {"grammar": 'start: "%json {" %json {"type": "array", "items": {"const": 1}} %json { }'}
ALLOWED: list[tuple[dict[str, Any], str, int]] = [  # how many letters of a text a form allows
    # A whole number has 64 bits unless its schema says otherwise; a fraction may go on.
    ({"json": {"type": "integer"}}, "1" + "0" * 39, 19),
    ({"json": {"type": ["integer", "null"]}}, "1" + "0" * 39, 19),
    ({"json": {"type": "integer", "minimum": 0, "maximum": 99}}, "1" + "0" * 39, 2),
    ({"json": {"type": "number"}}, "1" + "0" * 39, 40),
    # Names count as often as they come where that is asked for.
    ({"json": LENIENT | OBJECT, "strict": False}, '{"a":1,"a":1}', 13),
    ({"grammar": f"start: %json {json.dumps(LENIENT | OBJECT)}"}, '{"a":1,"a":1}', 13),
    ({"json": LENIENT | OBJECT, "strict": False}, '{"a":1}', 6),
    # White space is bounded: in a schema, an embedded one too, and in a pattern of the user's.
    (EMBEDDED, "%json {[ 1 ,\n 1]7", 17),
    (EMBEDDED, "%json {[  1", 9),
    ({"regex": ".*END"}, "any END", 7),  # an end that no walk finds by chance
    *(
        (form, "[" + " " * 40, 1 + most)
        for pattern, most in (("[ \\n]*", 16), (" {2,}", 18), (" +| ?", 17), ("[ *+]{0,3}", 3))
        for options in (ARRAY | {"x-guidance": {"whitespace_pattern": pattern}},)
        for form in ({"json": ARRAY, "whitespace_pattern": pattern}, {"grammar": f"start: %json {json.dumps(options)}"})
    ),
]


def compiled(**form: Any) -> GuidanceGrammar:
    return GuidanceGrammar.compile(StructuredOutputsParams(**form), library_tokenizer())


def num_allowed(form: dict[str, Any], text: str) -> int:
    return compiled(**form).num_allowed(tiny_tokenizer().encode(text))


class TestFormsThatEnd:
    @pytest.mark.parametrize("schema", ENDS, ids=json.dumps)
    def test_every_walk_ends_in_a_valid_document(self, schema: dict[str, Any]) -> None:
        start = compiled(json=schema)
        for seed in range(8):
            rng, place, text = random.Random(seed), start.copy(), b""
            for _ in range(400):
                words = np.zeros((1, mask_width(len(tiny_tokenizer()))), np.int32)
                place.fill(words, [])
                allowed = np.unpackbits(words.view(np.uint8), bitorder="little").nonzero()[0].tolist()
                assert allowed, f"nothing follows {text!r}"
                if place.is_accepting():
                    break
                closing = [t for t in allowed if bytes_of()[t] in (b'"', b"}", b"]")]
                token = rng.choice(closing if closing and rng.random() < 0.3 else [t for t in allowed if t])
                text += bytes_of()[token]
                place.accept_token(token)
            else:
                continue  # it went on in a long string
            jsonschema.validate(json.loads(text), schema)

    @pytest.mark.parametrize(
        "grammar",
        [
            'start: "(" start? ")"',
            'start: ("(" start)* a\na: [start] X\nX: "a"..."c" | "start"'.replace("...", ".."),
            'start: b "a" | (start "c" | b){0,3} start | b -> start\nb: "x" | b "y" // b: b',
            'start: b ~ 0..2 "x"\n?b: "y" b?\n',
            'root ::= "a" root | "b"',
            'start: %json {"const": "start: start"} | start "x"',
        ],
    )
    def test_a_grammar_with_an_end_is_taken(self, grammar: str) -> None:
        assert compiled(grammar=grammar).num_allowed([0]) == 0

    @pytest.mark.parametrize(("form", "says"), REFUSED, ids=str)
    def test_a_form_that_cannot_be_used_is_refused(self, form: dict[str, Any], says: str) -> None:
        with pytest.raises(ValueError, match=says):
            compiled(**form)

    @pytest.mark.parametrize(("form", "text", "number"), ALLOWED, ids=str)
    def test_what_a_form_allows_of_a_text(self, form: dict[str, Any], text: str, number: int) -> None:
        assert num_allowed(form, text) == number

    def test_separators_and_texts_of_fractions_are_bounded(self) -> None:
        for options in {"whitespace_pattern": " *"}, {"item_separator": ",\\s*"}, {"whitespace_flexible": True}:
            for fields in {}, {"disable_any_whitespace": True}:
                form = {"json": ARRAY | {"x-guidance": options}, **fields}
                assert num_allowed(form, "[1," + " " * 40) <= 3 + 17
        for bound, texts in (
            ({"exclusiveMinimum": 1}, ("1.0000000000000000000001", "1.0000000000000002")),
            ({"exclusiveMaximum": 1.5, "maximum": 2}, ("1.49999999999999999999999", "1.4999")),
            ({"exclusiveMinimum": 0}, ("0." + "0" * 330 + "1", "0." + "0" * 60 + "1")),
        ):
            form = {"json": {"type": "number", **bound}}
            wrong, right = (num_allowed(form, f"{text} ") == len(text) for text in texts)
            assert right and not wrong
