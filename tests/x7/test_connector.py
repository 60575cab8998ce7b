"""The core's hook, by a connector that is no elective: what went away and came back answers as if it had never left."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from folovllm import plugins
from folovllm.engine.llm_engine import LLMEngine
from folovllm.sampling_params import SamplingParams
from tests.helpers import prompts
from tests.workloads import Request, assert_nothing_left, serve
from tests.x3.engines import make_engine
from tests.x7.double import DictConnector

PLAIN = SamplingParams(temperature=0.8, seed=1, max_tokens=8, ignore_eos=True)
SMALL: dict[str, Any] = {
    "block_size": 4,
    "num_kv_blocks": 24,
    "max_num_batched_tokens": 24,
    "max_num_seqs": 4,
    "max_model_len": 64,
}


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch) -> type[DictConnector]:
    """Each engine gets a `DictConnector`."""
    monkeypatch.setitem(plugins.CONNECTORS, "double", ("tests.x7.double:DictConnector", lambda config: True))
    return DictConnector


def rounds() -> list[list[Request]]:
    """Prompts with heads in common, then others that push them out, then the first again, longer."""
    heads = prompts([24, 20, 28], seed=3)
    tails = prompts([3, 5, 2, 6, 4, 1], seed=5)
    first = [
        Request(head + tail, replace(PLAIN, seed=i)) for i, (head, tail) in enumerate(zip(heads, tails, strict=False))
    ]
    others = [Request(prompt, replace(PLAIN, seed=9)) for prompt in prompts([33, 29, 31, 27, 30], seed=8)]
    again = [
        Request(head + tail, replace(PLAIN, seed=i))
        for i, (head, tail) in enumerate(zip(heads, tails[3:], strict=True))
    ]
    return [first, others, again, first]


def answers(engine: LLMEngine, requests: list[Request]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in serve(engine, requests)]


@pytest.mark.parametrize("preset", ["m5", "m6"])
@pytest.mark.parametrize("broken", [0, 2])
@pytest.mark.parametrize("delay", [0, 3])
def test_what_comes_back_is_what_left(
    double: type[DictConnector], monkeypatch: pytest.MonkeyPatch, preset: str, broken: int, delay: int
) -> None:
    monkeypatch.setattr(double, "broken", broken)
    monkeypatch.setattr(double, "delay", delay)
    engine = make_engine(milestone=preset, **SMALL)
    expected = make_engine(milestone=preset, **SMALL | {"num_kv_blocks": 400})
    for requests in rounds():
        assert answers(engine, requests) == answers(expected, requests)
        assert_nothing_left(engine)
    connector: Any = engine.scheduler.connector  # type: ignore[attr-defined]
    assert connector.num_loaded > 8 and not connector.loads
