"""The core's hook, by a connector that is no elective: what went away and came back answers as if it had never left."""

from __future__ import annotations

from typing import Any

import pytest

from folovllm import plugins
from tests.workloads import assert_nothing_left
from tests.x7.double import DictConnector
from tests.x7.engines import ROOMY, SMALL, answers, make_engine, rounds


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch) -> type[DictConnector]:
    """An engine with `kv_offload` gets a `DictConnector`."""
    monkeypatch.setitem(plugins.CONNECTORS, "kv_offload", "tests.x7.double:DictConnector")
    return DictConnector


@pytest.mark.parametrize("preset", ["m5", "m6"])
@pytest.mark.parametrize("broken", [0, 2])
@pytest.mark.parametrize("delay", [0, 3])
def test_what_comes_back_is_what_left(
    double: type[DictConnector], monkeypatch: pytest.MonkeyPatch, preset: str, broken: int, delay: int
) -> None:
    monkeypatch.setattr(double, "broken", broken)
    monkeypatch.setattr(double, "delay", delay)
    engine = make_engine(milestone=preset, kv_offload="1MiB", **SMALL)
    expected = make_engine(milestone=preset, **ROOMY)
    for requests in rounds():
        assert answers(engine, requests) == answers(expected, requests)
        assert_nothing_left(engine)
    connector: Any = engine.scheduler.connector  # type: ignore[attr-defined]
    assert connector.num_loaded > 8 and not connector.loads
