"""The chain of M1: one request at a time, step by step; abort; two engines in one process."""

import sys
import weakref
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from transformers.utils import logging as hf_logging

from folovllm import LLM, EngineConfig, SamplingParams
from tests.helpers import tiny_checkpoint
from tests.workloads import run_to_end

PARAMS = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)


@pytest.fixture(scope="module", params=["hf", "native"])
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    with LLM(str(tiny_checkpoint()), milestone="m1", model_impl=request.param, use_tqdm=False) as llm:
        yield llm
        assert not llm.engine.has_unfinished_requests()


def drain(llm: LLM) -> list[str]:
    """Run to the end; ids in the order of finishing."""
    return [output.request_id for output in run_to_end(llm.engine) if output.finished]


def test_the_whole_prompt_in_one_step_then_a_token_a_step(llm: LLM) -> None:
    llm.engine.history = []
    llm.generate([5] * 20, PARAMS, use_tqdm=False)
    assert [(s.num_prefill_tokens, s.num_decode_tokens) for s in llm.engine.history] == [(20, 0)] + [(0, 1)] * 4
    starts = [scheduled[2] for s in llm.engine.history for scheduled in s.scheduled_seqs]
    assert starts == [0, 20, 21, 22, 23]


def test_one_at_a_time_first_come_first_served(llm: LLM) -> None:
    llm.engine.history = []
    for name in "abc":
        llm.engine.add_request(name, "Hello", PARAMS)
    llm.engine.step()
    assert (llm.engine.stats().running, llm.engine.stats().waiting) == (1, 2)
    assert drain(llm) == ["a", "b", "c"]
    served = [scheduled[0] for s in llm.engine.history for scheduled in s.scheduled_seqs]
    assert served == ["a"] * 5 + ["b"] * 5 + ["c"] * 5
    assert {s.running for s in llm.engine.history} == {1}


def test_abort_running_and_waiting(llm: LLM) -> None:
    expected = llm.generate("third", PARAMS, use_tqdm=False)[0]["token_ids"]
    for name in ("first", "second", "third"):
        llm.engine.add_request(name, name, PARAMS)
    llm.engine.step()
    llm.engine.step()
    running, waiting = llm.engine.abort_request("first"), llm.engine.abort_request("second")
    for output, count in ((running, 2), (waiting, 0)):
        assert output.finished and output.outputs[0].finish_reason == "abort"
        assert len(output["token_ids"]) == count
    assert run_to_end(llm.engine)[-1]["token_ids"] == expected, "a cache outlived its request"


def test_abort_one_of_n_answers_aborts_all(llm: LLM) -> None:
    llm.engine.add_request("r", "Hello", replace(PARAMS, n=3))
    llm.engine.step()
    output = llm.engine.abort_request("r")
    assert [c.finish_reason for c in output.outputs] == ["abort"] * 3
    assert not llm.engine.has_unfinished_requests() and llm.engine.step() == []


def test_parameters_may_change_once_they_were_given(llm: LLM) -> None:
    """The next request may have others, from the same object; those that run keep theirs."""
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, stop=["\n\n\n"], stop_token_ids=[3])
    expected = llm.generate([5, 6, 7], params, use_tqdm=False)[0].outputs[0]
    llm.engine.add_request("a", [5, 6, 7], params)
    llm.engine.step()
    params.logprobs, params.min_tokens, params.include_stop_str_in_output = 2, 6, True
    params.stop.append("e")
    params.stop_token_ids += range(4, 250)
    answer = run_to_end(llm.engine)[-1].outputs[0]
    assert (answer.token_ids, answer.text, answer.logprobs) == (expected.token_ids, expected.text, None)
    assert len(params.stop) == 2, "the caller's own are as the caller left them"


@pytest.mark.parametrize("milestone", ["m1", *(pytest.param(m, marks=getattr(pytest.mark, m)) for m in ("m2", "m6"))])
def test_a_closed_engine_says_so_and_gives_its_model_back(milestone: str) -> None:
    llm = LLM(str(tiny_checkpoint()), milestone=milestone, device="cpu", use_tqdm=False)
    weights = weakref.ref(llm.engine.executor._worker.runner.model)
    llm.engine.add_request("cut off", "Hello", PARAMS)
    llm.engine.step()
    llm.close()
    llm.close()
    assert weights() is None
    for use in (
        lambda: llm.generate("Hello", PARAMS, use_tqdm=False),
        lambda: llm.generate([], use_tqdm=False),
        lambda: llm.chat([{"role": "user", "content": "Hello"}], PARAMS, use_tqdm=False),
        lambda: llm.engine.add_request("r", "Hello", PARAMS),
        lambda: llm.engine.step(),
        lambda: llm.engine.stats(),
    ):
        with pytest.raises(RuntimeError, match="the engine was closed: make a new one"):
            use()
    assert not llm.engine.has_unfinished_requests()


@pytest.mark.parametrize("use_tqdm", [False, True])
def test_transformers_shows_its_progress_when_asked_for(
    use_tqdm: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)  # elsewhere it shows none
    hf_logging.enable_progress_bar()  # as it is outside of tests
    try:
        LLM(str(tiny_checkpoint()), milestone="m1", device="cpu", use_tqdm=use_tqdm).close()
        assert hf_logging.is_progress_bar_enabled(), "afterwards all is as before"
    finally:
        hf_logging.disable_progress_bar()
    assert ("Loading weights" in capsys.readouterr().err) == use_tqdm


def test_dtype_is_what_was_asked_for() -> None:
    llm = LLM(str(tiny_checkpoint()), milestone="m1", dtype="bfloat16", device="cpu", use_tqdm=False)
    runner = llm.engine.executor._worker.runner
    assert runner.model.dtype is torch.bfloat16
    assert len(llm.generate("Hello", PARAMS, use_tqdm=False)[0]["token_ids"]) == 5


def test_max_model_len_defaults_to_the_smaller_of_the_models_and_4096() -> None:
    config = EngineConfig(milestone="m1")
    assert config.resolve_max_model_len(512) == 512
    assert config.resolve_max_model_len(40960) == 4096
    assert EngineConfig(milestone="m1", max_model_len=8192).resolve_max_model_len(40960) == 8192


def test_m1_with_the_naive_backend_is_our_own_layers() -> None:
    """The first rung of the ladder of backends; transformers' layers attend by themselves."""
    llm = LLM(str(tiny_checkpoint()), milestone="m1", attention_backend="torch_naive", use_tqdm=False)
    setup = llm.engine.setup
    assert (setup.config.model_impl, setup.config.kv_cache, setup.backend) == ("native", "growing", "torch_cat")
    plain = LLM(str(tiny_checkpoint()), milestone="m1", use_tqdm=False)
    answers = [each.generate([[5, 6, 7]], PARAMS, use_tqdm=False)[0]["token_ids"] for each in (llm, plain)]
    assert answers[0] == answers[1]
    with pytest.raises(ValueError, match='take "torch_naive" and model_impl="native"'):
        LLM(str(tiny_checkpoint()), milestone="m1", model_impl="hf", attention_backend="torch_naive", use_tqdm=False)
