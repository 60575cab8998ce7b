"""Whatever a request asks for, M6 gives M1's answer, in pools of every kind, and no step waits for it."""

from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest
import torch

from folovllm.engine.llm_engine import LLMEngine
from folovllm.engine.overlap import OverlappedEngine
from folovllm.executor.abstract import Pending
from folovllm.outputs import RequestOutput
from folovllm.sampling_params import SamplingParams
from folovllm.step.schedule import SchedulerOutput, StepResult
from tests.helpers import prompts, tiny_checkpoint
from tests.m6.test_overlap import assert_clean, engine
from tests.workloads import Request, make_engine, serve

BASE = SamplingParams(max_tokens=12, ignore_eos=True, temperature=0.9)
EVERY_DRAW = [
    {},
    {"repetition_penalty": 1.6},
    {"presence_penalty": 1.5, "frequency_penalty": 0.8, "logprobs": 2},
    {"repetition_penalty": 1.4, "temperature": 0.0, "logprobs": 0},
    {"min_tokens": 7, "stop_token_ids": list(range(0, 250, 2))},
    {"min_tokens": 5, "stop_token_ids": list(range(1, 250, 3)), "top_p": 0.9, "frequency_penalty": 0.5},
    {"top_k": 5},
    {"top_p": 0.7, "logprobs": 4},
    {"min_p": 0.1, "top_k": 30},
    {"top_k": 40, "top_p": 0.8, "repetition_penalty": 0.7},
    {"logprobs": 3},
    {"temperature": 0.0},
    {"allowed_token_ids": list(range(3, 250, 7))},
    {"allowed_token_ids": [5, 40, 41, 42, 200], "repetition_penalty": 1.5, "top_p": 0.8, "temperature": 1.5},
    {"allowed_token_ids": list(range(100)), "min_tokens": 6, "stop_token_ids": list(range(0, 250, 2)), "logprobs": 1},
    {"allowed_token_ids": [64, 65, 66], "bad_words": ["ab", "bca", "cc", "bab"], "temperature": 5.0},
    {"allowed_token_ids": [64, 65, 66], "bad_words": ["abc", "bbbb"], "logit_bias": {64: 3.3, 65: 4.1}, "top_k": 2},
    {"logit_bias": {7: 30.3, 9: 30, 11: 29.1, 12: -100}, "frequency_penalty": 2.0, "logprobs": 2},
    {"logit_bias": {64: 100}, "bad_words": ["aaa"], "temperature": 0.0, "prompt_logprobs": 1},
    {"stop": ["a", "e", "\x00", "z"]},
    {"stop": ["q", "ab"], "min_tokens": 4, "include_stop_str_in_output": True},
    {"top_k": 5, "stop_token_ids": list(range(3, 250, 7))},
    {"n": 3, "min_p": 0.05},
    {"temperature": 0.0, "max_tokens": 1},
]
POOLS: dict[str, dict[str, Any]] = {
    "everything at once": {},
    "preemption": {"block_size": 4, "num_kv_blocks": 33},
    "chunks": {"max_num_batched_tokens": 14, "long_prefill_token_threshold": 9},
    "rows that change hands": {"max_num_seqs": 3},
    "no graphs": {"enforce_eager": True},
    "no overlap": {"async_scheduling": False},
}
EARLIER: dict[str, dict[str, Any]] = {
    "m2": {"milestone": "m2"},
    "m5, preemption": {"milestone": "m5", "block_size": 4, "num_kv_blocks": 40},
}
SMALL_POOLS: dict[str, dict[str, Any]] = {
    "preemption and chunks": {"block_size": 4, "num_kv_blocks": 40, "max_num_batched_tokens": 7},
    "preemption, blocks of one token": {"block_size": 1, "num_kv_blocks": 150, "enable_prefix_caching": False},
    "prompts that come token by token": {"long_prefill_token_threshold": 1},  # such a step looks like one of decodes
}


def requests() -> list[Request]:
    """Prompts of all lengths; two and two begin alike, so that prefixes are found again."""
    lengths = [1, 40, 9, 17, 33, 3]
    starts = prompts(lengths, seed=11)
    params = [replace(BASE, seed=100 + i, **draw) for i, draw in enumerate(EVERY_DRAW)]
    return [Request([*starts[i % 6], *range(i)], own) for i, own in enumerate(params)]


@lru_cache(maxsize=2)
def answers_of_m1(family: str = "qwen3") -> list[tuple[Any, ...]]:
    return [essence(output) for output in serve(make_engine(tiny_checkpoint(family), milestone="m1"), requests())]


def essence(output: RequestOutput) -> tuple[Any, ...]:
    """Texts, tokens, why they end, and for each token the ids, ranks and values of its log-probabilities."""
    rows = [row for answer in output.outputs for row in answer.logprobs or []]
    values = [x.logprob for row in rows for x in row.values()]
    answers = [(o.text, o.token_ids, o.finish_reason, o.stop_reason) for o in output.outputs]
    return answers, [[(i, x.rank) for i, x in row.items()] for row in rows], values


def check(outputs: list[RequestOutput], family: str = "qwen3") -> None:
    """Each answer is M1's, or of one that was aborted the beginning of it."""
    for draw, output, expected in zip(EVERY_DRAW, outputs, answers_of_m1(family), strict=True):
        if output.outputs[0].finish_reason == "abort":
            for answer, (_, whole, *_) in zip(output.outputs, expected[0], strict=True):
                assert answer.token_ids == whole[: len(answer.token_ids)], draw
            continue
        *same, values = essence(output)
        assert same == list(expected[:-1]), draw
        assert values == pytest.approx(expected[-1], abs=1e-3), draw


@pytest.mark.parametrize("pool", POOLS | SMALL_POOLS | EARLIER)
def test_answers_are_those_of_m1(pool: str) -> None:
    """Beside some that are aborted; then again, with all prompts in the cache."""
    served = engine(**(POOLS | SMALL_POOLS | EARLIER)[pool])
    assert isinstance(served.loop, OverlappedEngine) is (pool not in ("no overlap", *EARLIER))
    check(serve_and_abort(served))
    check(serve(served, requests(), "random_steps", seed=1))
    assert_clean(served)
    assert (served.stats().preemptions > 0) == ("preemption" in pool)


def serve_and_abort(served: LLMEngine) -> list[RequestOutput]:
    """The requests' last outputs. Each third one is aborted at another step, as soon or as late as it comes."""
    finished: dict[str, RequestOutput] = {}
    for i, request in enumerate(requests()):
        served.add_request(str(i), request.prompt, request.params)
    for step in range(500):
        if (victim := str(3 * step)) in served.core.output_processor.requests:
            finished[victim] = served.abort_request(victim)
        finished |= {output.request_id: output for output in served.step()}
        if not served.has_unfinished_requests():
            return [finished[str(i)] for i in range(len(EVERY_DRAW))]
    raise AssertionError("still not finished")


class Logged:
    """A step whose wait is noted."""

    def __init__(self, pending: Pending, number: int, log: list[str]) -> None:
        self._pending, self._number, self._log = pending, number, log

    def wait(self) -> StepResult:
        self._log.append(f"wait {self._number}")
        return self._pending.wait()


def test_no_step_waits_for_a_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step is started before the one before it is taken in, whatever its sequences draw with."""
    served, log = engine(), []
    submit = served.executor.submit

    def logged(output: SchedulerOutput) -> Logged:
        assert not served.scheduler.must_wait()
        number = sum(entry.startswith("start") for entry in log)
        log.append(f"start {number}")
        return Logged(submit(output), number, log)

    monkeypatch.setattr(served.executor, "submit", logged)
    check(serve(served, requests()))
    last = sum(entry.startswith("start") for entry in log) - 1
    between = [entry for i in range(last) for entry in (f"start {i + 1}", f"wait {i}")]
    assert log == ["start 0", *between, f"wait {last}"] and last >= BASE.max_tokens - 1


@pytest.mark.parametrize("special", [False, True])
def test_plain_steps_take_the_plain_draw(monkeypatch: pytest.MonkeyPatch, special: bool) -> None:
    """Whoever asks for nothing pays for nothing; log-probabilities alone are nothing that the draw must know."""
    served = engine()
    runner = served.executor._worker.runner
    draw, calls = runner._row_sampler.sample, []
    monkeypatch.setattr(runner._row_sampler, "sample", lambda *args: calls.append(args) or draw(*args))
    plain = {i for i, d in enumerate(EVERY_DRAW) if not d.keys() - {"logprobs", "temperature", "stop", "max_tokens"}}
    serve(served, [request for i, request in enumerate(requests()) if i in plain or special])
    assert bool(calls) == special


@pytest.mark.gpu
@pytest.mark.parametrize("pool", POOLS)
def test_on_a_gpu(pool: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """M5's answers on the same card, in batches that cross the captured widths.

    With graphs and overlap a decode step, or what a new row brings, never makes the host wait.
    """
    fields = {"device": "cuda", "dtype": "float32", "attention_backend": "triton"}
    expected = [essence(output) for output in serve(engine(milestone="m5", **fields), requests())]
    served = engine(**fields, **POOLS[pool])
    if strict := not POOLS[pool]:
        runner = served.executor._worker.runner
        forbid_waits(monkeypatch, runner, "execute_model")
        forbid_waits(monkeypatch, runner._row_sampler, "set_rows")
        forbid_waits(monkeypatch, runner, "_gather_logprobs")
    outputs = serve(served, requests(), "at_once" if strict else "random_steps")
    for draw, output, (*same, values) in zip(EVERY_DRAW, outputs, expected, strict=True):
        *mine, own = essence(output)
        assert mine == same, draw
        assert own == pytest.approx(values, abs=1e-3), draw
    assert_clean(served)


def forbid_waits(monkeypatch: pytest.MonkeyPatch, target: object, name: str) -> None:
    """From now on this method raises where it waits for the device, but for steps that are no decode steps."""
    own = getattr(target, name)

    def strict(*args: Any) -> Any:
        if not getattr(args[0], "is_decode", True):
            return own(*args)
        torch.cuda.set_sync_debug_mode("error")
        try:
            return own(*args)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(target, name, strict)
