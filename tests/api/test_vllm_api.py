"""Code that was written for vLLM's offline API runs here with its import line changed, or is told in a sentence why not."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from folovllm import LLM, EngineConfig, SamplingParams
from folovllm.engine.beam_search import BeamSearchParams
from folovllm.engine.llm_engine import LLMEngine
from folovllm.engine.prompt_forms import TextPrompt, TokensPrompt
from folovllm.outputs import RequestOutput
from folovllm.sampling_params import RequestOutputKind
from tests.helpers import hf_model, prompts, tiny_checkpoint
from tests.workloads import run_to_end

PATH = str(tiny_checkpoint())
GREEDY = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
FIELDS: dict[str, Any] = {"milestone": "m1", "device": "cpu", "use_tqdm": False}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(PATH, **FIELDS) as llm:
        yield llm


def ids_of(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(scope="module")
def expected(llm: LLM) -> list[int]:
    return ids_of(llm.generate("Hello", GREEDY, use_tqdm=False))[0]


class TestPrompts:
    @pytest.mark.parametrize(
        "prompt",
        [
            {"prompt": "Hello"},
            {"prompt_token_ids": [39, 68, 75, 75, 78]},
            TextPrompt(prompt="Hello"),
            TokensPrompt(prompt_token_ids=[39, 68, 75, 75, 78]),
            TokensPrompt(prompt_token_ids=[39, 68, 75, 75, 78], prompt="what I know it as"),
            {"prompt": "Hello", "multi_modal_data": None},
            {"prompt_token_ids": torch.tensor([39, 68, 75, 75, 78]).numpy()},
        ],
    )
    def test_dictionaries(self, llm: LLM, prompt: Any, expected: list[int]) -> None:
        assert ids_of(llm.generate(prompt, GREEDY, use_tqdm=False)) == [expected], "one is a prompt"
        outputs = llm.generate([prompt, "Hello"], GREEDY, use_tqdm=False)
        assert ids_of(outputs) == [expected] * 2
        assert [output.prompt for output in outputs] == [prompt.get("prompt"), "Hello"]
        llm.engine.add_request("r", prompt, GREEDY, stream=False)
        assert ids_of([o for _ in range(5) for o in llm.engine.step()]) == [expected]

    def test_prompt_token_ids_as_an_argument(self, llm: LLM) -> None:
        with pytest.raises(ValueError, match="a prompt is a text or a list of token ids"):
            llm.generate(prompt_token_ids=[39, 68], sampling_params=GREEDY, use_tqdm=False)

    def test_a_salt_in_the_prompt(self, llm: LLM) -> None:
        llm.engine.add_request("r", {"prompt": "Hello", "cache_salt": "mine"}, GREEDY)
        assert llm.engine.core.output_processor.requests["r"].seqs[0].request.cache_salt == "mine"
        llm.engine.abort_request("r")

    @pytest.mark.m2
    def test_priority(self) -> None:
        with LLM(PATH, **FIELDS | {"milestone": "m2", "scheduling": "priority", "max_num_seqs": 1}) as llm:
            llm.engine.history = []
            llm.generate(["a", "b", "c"], replace(GREEDY, max_tokens=1), priority=[2, 0, 1], use_tqdm=False)
            served = [scheduled[0][-1] for step in llm.engine.history for scheduled in step.scheduled_seqs]
            assert served == ["1", "2", "0"]
            with pytest.raises(ValueError, match="2 priority for 1 prompts"):
                llm.generate(["a"], GREEDY, priority=[1, 2], use_tqdm=False)

    def test_truncate_prompt_tokens(self, llm: LLM) -> None:
        (output,) = llm.generate([list(range(9))], replace(GREEDY, truncate_prompt_tokens=4), use_tqdm=False)
        assert output.prompt_token_ids == [5, 6, 7, 8]
        fits = replace(GREEDY, truncate_prompt_tokens=-1)
        (output,) = llm.generate([[1] * 600 + [2]], fits, use_tqdm=False)
        assert output.prompt_token_ids == [1] * 510 + [2] and len(ids_of([output])[0]) == 1


class TestSamplingParams:
    def test_none_and_minus_one_that_say_nothing(self) -> None:
        params = SamplingParams(stop=None, stop_token_ids=None, seed=None, max_tokens=None, logprobs=None)  # type: ignore[arg-type]
        assert (params.stop, params.stop_token_ids, params.seed) == ([], [], None)
        assert SamplingParams(seed=-1).seed is None and SamplingParams(seed=-1) == SamplingParams()
        assert SamplingParams(top_k=0).top_k == 0 and SamplingParams(top_k=-1).top_k == -1
        assert SamplingParams.from_optional(n=None, temperature=None, top_p=0.5, max_tokens=None) == SamplingParams(
            top_p=0.5, max_tokens=None
        )

    @pytest.mark.parametrize(
        "neutral",
        [
            {"best_of": None, "use_beam_search": False, "prompt_logprobs": None, "logit_bias": None, "bad_words": None},
            {"best_of": 1, "bad_words": [], "allowed_token_ids": None, "structured_outputs": None, "logit_bias": {}},
            {"guided_decoding": None, "logits_processors": None, "spaces_between_special_tokens": True},
        ],
    )
    def test_what_changes_nothing_is_taken(self, neutral: dict[str, Any]) -> None:
        assert SamplingParams(**neutral) == SamplingParams()

    @pytest.mark.parametrize(
        ("name", "value", "says"),
        [
            ("best_of", 3, "ask for n answers with logprobs=0"),
            ("guided_decoding", {"regex": "a"}, "say structured_outputs"),
            ("logits_processors", [print], "leave it out"),
            ("use_beam_search", True, "call LLM.beam_search"),
        ],
    )
    def test_what_would_change_something_is_refused_in_a_sentence(self, name: str, value: Any, says: str) -> None:
        with pytest.raises(ValueError, match=f"{name}=.* is not supported here: {says}"):
            SamplingParams(**{name: value})

    def test_logprobs_as_a_switch(self, llm: LLM) -> None:
        assert SamplingParams(logprobs=True).logprobs == 1 and SamplingParams(logprobs=False).logprobs is None
        (output,) = llm.generate("Hello", replace(GREEDY, logprobs=True), use_tqdm=False)
        assert [len(row) for row in output.outputs[0].logprobs or []] == [1] * 5

    def test_detokenize(self, llm: LLM) -> None:
        (plain,) = llm.generate("Hello", GREEDY, use_tqdm=False)
        (output,) = llm.generate("Hello", replace(GREEDY, detokenize=False, logprobs=1), use_tqdm=False)
        assert output.outputs[0].text == "" and ids_of([output]) == ids_of([plain])
        assert [entry.decoded_token for row in output.outputs[0].logprobs or [] for entry in row.values()] == [None] * 5
        with pytest.raises(ValueError, match="leave detokenize at True"):
            SamplingParams(detokenize=False, stop="x")

    def test_bounds(self, llm: LLM) -> None:
        for fields, says in (
            ({"n": 129}, "n is 129.* 128 at most.* max_n"),
            ({"logprobs": 21}, "logprobs is 21.*max_logprobs"),
        ):
            with pytest.raises(ValueError, match=says):
                llm.generate("Hello", SamplingParams(**fields), use_tqdm=False)  # type: ignore[arg-type]
        with LLM(PATH, **FIELDS, max_n=130, max_logprobs=0) as other:
            params = SamplingParams(n=130, max_tokens=1, seed=1)
            assert len(other.generate("Hello", params, use_tqdm=False)[0].outputs) == 130
            with pytest.raises(ValueError, match="logprobs is 1"):
                other.generate("Hello", SamplingParams(logprobs=1), use_tqdm=False)


def streamed(llm: LLM, params: SamplingParams) -> list[RequestOutput]:
    llm.engine.add_request("s", "Once upon a time", params)
    return run_to_end(llm.engine)


TWELVE = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=1)


@pytest.fixture(scope="module")
def whole(llm: LLM) -> RequestOutput:
    return llm.generate("Once upon a time", TWELVE, use_tqdm=False)[0]


class TestOutputKind:
    def test_delta_holds_what_is_new(self, llm: LLM, whole: RequestOutput) -> None:
        outputs = [o.outputs[0] for o in streamed(llm, replace(TWELVE, output_kind=RequestOutputKind.DELTA))]
        assert [o.token_ids for o in outputs] == [[token] for token in whole["token_ids"]]
        assert "".join(o.text for o in outputs) == whole["text"]
        assert [row for o in outputs for row in o.logprobs or []] == whole["logprobs"]
        assert outputs[-1].cumulative_logprob == whole["cumulative_logprob"] and outputs[-1].finished()

    def test_final_only_is_one_output(self, llm: LLM, whole: RequestOutput) -> None:
        (output,) = streamed(llm, replace(TWELVE, output_kind=RequestOutputKind.FINAL_ONLY))
        assert output.finished and output.outputs == whole.outputs

    @pytest.mark.parametrize("kind", RequestOutputKind)
    def test_generate_returns_whole_answers(self, llm: LLM, whole: RequestOutput, kind: RequestOutputKind) -> None:
        (output,) = llm.generate("Once upon a time", replace(TWELVE, output_kind=kind), use_tqdm=False)
        assert output.outputs == whole.outputs

    def test_delta_of_several_answers_names_those_with_news(self, llm: LLM) -> None:
        params = SamplingParams(n=3, seed=1, max_tokens=4, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
        outputs = streamed(llm, params)  # M1 serves one after the other
        assert [[answer.index for answer in output.outputs] for output in outputs] == [
            [i] for i in (0, 1, 2) for _ in range(4)
        ]
        assert [output.finished for output in outputs] == [False] * 11 + [True]

    def test_aborted_with_delta(self, llm: LLM) -> None:
        llm.engine.add_request("s", "Hello", replace(GREEDY, output_kind=RequestOutputKind.DELTA))
        first = llm.engine.step()[0].outputs[0]
        last = llm.engine.abort_request("s").outputs[0]
        assert len(first.token_ids) == 1 and (last.token_ids, last.finish_reason) == ([], "abort")


class TestEngineArguments:
    @pytest.mark.parametrize(
        ("name", "means"), [("half", "float16"), ("float", "float32"), (torch.bfloat16, "bfloat16")]
    )
    def test_other_names_of_dtypes(self, name: Any, means: str) -> None:
        assert EngineConfig(dtype=name).dtype == means

    def test_what_changes_nothing_is_taken(self) -> None:
        config = EngineConfig(
            model=PATH, swap_space=4, quantization=None, revision=None, load_format="auto", disable_log_stats=True,
            hf_overrides=None, tokenizer_mode="auto", cpu_offload_gb=0, kv_cache_dtype="auto", generation_config="auto",
        )  # type: ignore[call-arg]  # fmt: skip
        assert config == EngineConfig(model=PATH)

    @pytest.mark.parametrize(
        "fields",
        [
            {"quantization_config": {"a": 1}},
            {"load_format": "dummy"},
            {"hf_overrides": {"a": 1}},
            {"pipeline_parallel_size": 2},
        ],
    )
    def test_what_would_change_something_is_refused(self, fields: dict[str, Any]) -> None:
        with pytest.raises(ValueError, match=f"{next(iter(fields))}=.* is not supported here"):
            LLM(PATH, **fields)

    def test_no_adapter(self, llm: LLM) -> None:
        assert llm.generate([], GREEDY, lora_request=None) == []  # type: ignore[call-arg]
        with pytest.raises(ValueError, match="lora_request='x' is not supported here"):
            llm.generate([], GREEDY, lora_request="x")  # type: ignore[call-arg]


class TestMethods:
    def test_the_engine_and_the_tokenizer(self, llm: LLM) -> None:
        assert llm.llm_engine is llm.engine and llm.get_tokenizer() is llm.tokenizer is llm.llm_engine.get_tokenizer()

    def test_default_sampling_params(self, llm: LLM, tmp_path: Path) -> None:
        assert llm.get_default_sampling_params() == SamplingParams()
        shutil.copytree(PATH, tmp_path / "m")
        said = {"temperature": 0.25, "top_k": 7, "top_p": 0.5, "max_new_tokens": 3, "do_sample": True}
        (tmp_path / "m" / "generation_config.json").write_text(json.dumps(said))
        with LLM(str(tmp_path / "m"), **FIELDS) as other:
            expected = SamplingParams(temperature=0.25, top_k=7, top_p=0.5, max_tokens=3)
            assert other.get_default_sampling_params() == expected
            assert len(ids_of(other.generate("Hello", use_tqdm=False))[0]) <= 3, "a call that says nothing takes them"
            assert len(ids_of(other.generate("Hello", GREEDY, use_tqdm=False))[0]) == 5, (
                "a call that says something does not"
            )

    @pytest.mark.m5
    def test_reset_prefix_cache(self) -> None:
        with LLM(PATH, **FIELDS | {"milestone": "m5", "block_size": 4}) as llm:
            cached = []
            for _ in range(2):
                cached.append(llm.generate([[1] * 20], GREEDY, use_tqdm=False)[0].num_cached_tokens)
            assert llm.reset_prefix_cache() is True
            cached.append(llm.generate([[1] * 20], GREEDY, use_tqdm=False)[0].num_cached_tokens)
            assert cached[0] == cached[2] == 0 < cached[1]

    def test_no_prefix_cache(self, llm: LLM) -> None:
        with pytest.raises(ValueError, match="there is no prefix cache"):
            llm.reset_prefix_cache()

    def test_abort_several(self, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in "abcd":
            llm.engine.add_request(name, "Hello", GREEDY)
        llm.engine.step()
        passes = []
        abort = llm.engine.scheduler.abort
        monkeypatch.setattr(llm.engine.scheduler, "abort", lambda *seqs: (passes.append(len(seqs)), abort(*seqs)))
        gone = llm.engine.abort_request(["a", "ghost", "c", "a"])
        assert [output.request_id for output in gone] == ["a", "c"] and passes == [2], (
            "one pass over the queues for all"
        )
        assert llm.engine.abort_request(["ghost"]) == [] and llm.engine.get_num_unfinished_requests() == 2
        assert [output.request_id for output in llm.engine.abort_request(["b", "d"])] == ["b", "d"]
        assert (llm.engine.stats().waiting, llm.engine.stats().running) == (0, 0)


class TestOneEngine:
    def test_whatever_the_import(self) -> None:
        import folovllm
        import folovllm.compat

        assert folovllm.LLMEngine is folovllm.compat.LLMEngine is LLMEngine
        assert folovllm.TokensPrompt is TokensPrompt and folovllm.RequestOutputKind is RequestOutputKind

    @pytest.mark.m6
    def test_from_engine_args_takes_the_loop_that_they_ask_for(self) -> None:
        from folovllm.engine.overlap import OverlappedEngine

        args = EngineConfig(
            model=PATH, **FIELDS | {"milestone": "m6", "attention_backend": "torch_paged", "max_num_seqs": 2}
        )
        assert isinstance(LLMEngine.from_engine_args(args).loop, OverlappedEngine)


class TestBeamSearch:
    def test_beams_are_transformers(self, llm: LLM) -> None:
        (prompt,) = prompts([7])
        (output,) = llm.beam_search(
            [{"prompt_token_ids": prompt}], BeamSearchParams(beam_width=4, max_tokens=6, ignore_eos=True)
        )
        ids = torch.tensor([prompt])
        expected = hf_model(Path(PATH)).generate(
            ids, attention_mask=torch.ones_like(ids), num_beams=4, num_return_sequences=4, max_new_tokens=6,
            do_sample=False, eos_token_id=None, pad_token_id=0, return_dict_in_generate=True, output_scores=True,
        )  # fmt: skip
        assert [beam.tokens for beam in output.sequences] == expected.sequences.tolist()
        scores = [beam.cum_logprob / 6 for beam in output.sequences]
        assert scores == pytest.approx(expected.sequences_scores.tolist(), abs=1e-3)
        assert output.sequences[0].text == llm.tokenizer.decode(output.sequences[0].tokens)

    def test_an_end_of_text_ends_a_beam(self, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        free = BeamSearchParams(beam_width=2, max_tokens=3, ignore_eos=True)
        (output,) = llm.beam_search(["Hello"], free)
        end = output.sequences[0].tokens[5]
        monkeypatch.setattr("folovllm.engine.beam_search.eos_token_ids", lambda *_: frozenset({end}))
        (output,) = llm.beam_search(["Hello"], replace(free, ignore_eos=False))
        for beam in output.sequences:
            assert (end in beam.tokens[5:]) == (beam.tokens[-1] == end) == (beam.finish_reason == "stop")
        assert any(beam.finish_reason == "stop" for beam in output.sequences)

    @pytest.mark.parametrize(
        ("width", "penalty", "expected"),
        [
            (2, 1.0, [[11, 30], [2]]),  # the end takes no open beam's place, and the best answer is found
            (1, 1.0, [[2]]),  # ended and open beams compete in the end: one of ten tokens is less likely than the end
            (3, 0.0, [[2], [11, 30], [10, 20]]),  # by their log-probability alone
        ],
    )
    def test_ended_beams_are_set_aside(
        self, llm: LLM, monkeypatch: pytest.MonkeyPatch, width: int, penalty: float, expected: list[list[int]]
    ) -> None:
        likely = {
            7: {10: 0.40, 2: 0.35, 11: 0.25},
            10: dict.fromkeys((20, 21, 22, 23), 0.2),
            11: {30: 0.97, 31: 0.01, 32: 0.01},
        }
        rest = {40: 0.97, 41: 0.01, 42: 0.01}

        def next_tokens(generate: Any, beams: list[Any], count: int) -> list[dict[int, float]]:
            rows = [likely.get(beam.tokens[-1], rest) for beam in beams]
            return [{token: math.log(p) for token, p in row.items()} for row in rows]

        monkeypatch.setattr("folovllm.engine.beam_search._next_tokens", next_tokens)
        monkeypatch.setattr("folovllm.engine.beam_search.eos_token_ids", lambda *_: frozenset({2}))
        params = BeamSearchParams(beam_width=width, max_tokens=10, length_penalty=penalty)
        (output,) = llm.beam_search([[7] * 10], params)
        assert [beam.tokens[10:12] for beam in output.sequences] == expected
        assert all((beam.tokens[-1] == 2) == (beam.finish_reason == "stop") for beam in output.sequences)

    @pytest.mark.parametrize("wrong", [{"length_penalty": math.nan}, {"length_penalty": 1e308}, {"ignore_eos": "no"}])
    def test_what_is_no_parameter(self, wrong: dict[str, Any]) -> None:
        with pytest.raises(ValueError, match=f"{next(iter(wrong))} must be"):
            BeamSearchParams(beam_width=2, max_tokens=3, **wrong)

    def test_beams_keep_their_prompts_salt(self) -> None:
        prompt: Any = {"prompt_token_ids": [5] * 40, "cache_salt": "mine"}
        with LLM(PATH, **FIELDS | {"milestone": "m5"}) as llm:
            llm.beam_search([prompt], BeamSearchParams(beam_width=2, max_tokens=2))
            (other,) = llm.generate([prompt["prompt_token_ids"]], SamplingParams(max_tokens=1), use_tqdm=False)
            assert other.num_cached_tokens == 0, "another tenant's prompt was found"

    def test_a_full_context_ends_a_beam(self) -> None:
        with LLM(PATH, **FIELDS, max_model_len=8) as llm:
            (output,) = llm.beam_search(["Hello"], BeamSearchParams(beam_width=2, max_tokens=9, ignore_eos=True))
            assert [(len(beam.tokens), beam.finish_reason) for beam in output.sequences] == [(8, "length")] * 2

    def test_a_beam_that_is_too_wide(self, llm: LLM) -> None:
        with pytest.raises(
            ValueError, match=r"beam_width is 11, .* 10 beams at most: ask for fewer, or raise max_logprobs to 22"
        ):
            llm.beam_search(["Hello"], BeamSearchParams(beam_width=11, max_tokens=1))

    def test_bad_values(self) -> None:
        for fields in ({"beam_width": 0, "max_tokens": 1}, {"beam_width": 1, "max_tokens": 1.5}):
            with pytest.raises(ValueError, match=r"must be at least 1 \(a whole number\)"):
                BeamSearchParams(**fields)  # type: ignore[arg-type]

    @pytest.mark.parametrize("params", [None, SamplingParams()], ids=type)
    def test_parameters_of_another_kind(self, llm: LLM, params: Any) -> None:
        with pytest.raises(ValueError, match="params must be a BeamSearchParams, not"):
            llm.beam_search(["Hello"], params)
