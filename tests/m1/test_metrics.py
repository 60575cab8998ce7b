"""Times and counts: what TTFT, TPOT, latency and tokens/s mean, and that the engine takes them so."""

import time

import pytest

from folovllm import LLM, SamplingParams
from folovllm.outputs import RequestMetrics
from tests.helpers import tiny_checkpoint

PARAMS = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(str(tiny_checkpoint()), milestone="m1", use_tqdm=False)


def test_definitions() -> None:
    metrics = RequestMetrics(arrival_time=10.0, num_prompt_tokens=7)
    assert metrics.ttft is None and metrics.tpot is None and metrics.latency is None
    metrics.first_token_time, metrics.num_generated_tokens = 10.5, 1
    assert metrics.ttft == 0.5 and metrics.tpot is None
    metrics.finish_time, metrics.num_generated_tokens = 12.5, 5
    assert metrics.tpot == 0.5, "two seconds over the four tokens after the first"
    assert metrics.latency == 2.5 and metrics.tokens_per_second == 2.0
    assert metrics["tpot"] == metrics.tpot


def test_the_engine_takes_them(llm: LLM) -> None:
    before = time.monotonic()
    metrics = llm.generate("Hello", PARAMS, use_tqdm=False)[0].metrics
    after = time.monotonic()
    assert metrics.first_token_time is not None and metrics.finish_time is not None
    assert before <= metrics.arrival_time < metrics.first_token_time < metrics.finish_time <= after
    assert (metrics.num_prompt_tokens, metrics.num_generated_tokens) == (5, 10)
    assert metrics.tpot == pytest.approx((metrics.finish_time - metrics.first_token_time) / 9)


def test_ttft_includes_the_wait(llm: LLM) -> None:
    first, second = llm.generate(["Hello", "Hello"], PARAMS, use_tqdm=False)
    assert first.metrics.latency is not None and second.metrics.ttft is not None
    assert second.metrics.ttft > 0.9 * first.metrics.latency


def test_a_request_that_never_ran_has_no_first_token(llm: LLM) -> None:
    llm.engine.add_request("r", "Hello", PARAMS)
    metrics = llm.engine.abort_request("r").metrics
    assert metrics.ttft is None and metrics.num_generated_tokens == 0 and metrics.latency is not None


def test_a_history_is_kept_only_where_it_is_asked_for(llm: LLM) -> None:
    llm.generate("Hello", PARAMS, use_tqdm=False)
    assert llm.engine.history is None and not llm.engine.events.on
    llm.engine.history = steps = []
    llm.generate("Hello", PARAMS, use_tqdm=False)
    assert llm.engine.history is steps and len(steps) == 10
    llm.engine.history = None
    llm.generate("Hello", PARAMS, use_tqdm=False)
    assert len(steps) == 10 and not llm.engine.events.on
