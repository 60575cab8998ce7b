"""The hooks by which an elective changes an engine, with an elective that is none."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest

import folovllm
from folovllm import LLM, SamplingParams
from folovllm.engine import extension as extensions
from folovllm.engine.extension import Extension
from folovllm.engine.scheduler import Scheduler
from folovllm.plugins import is_installed
from folovllm.worker.graph_runner import GraphRunner
from tests.helpers import tiny_checkpoint

PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


class Counts(Extension):
    """Puts a subclass in each place, and notes which hooks were called."""

    called: ClassVar[list[str]] = []

    def prepare(self) -> None:
        self.called.append("prepare")

    def num_samples(self) -> int:
        self.called.append("num_samples")
        return super().num_samples()

    def attention_backend(self, usual: Any) -> Any:
        self.called.append("attention_backend")
        return super().attention_backend(usual)

    def graph_runner(self, usual: Any) -> Any:
        self.called.append("graph_runner")
        return type("Own", (usual,), {})

    def scheduler(self, usual: Any, executor: Any) -> Any:
        self.called.append(f"scheduler of {executor.num_kv_blocks} blocks")
        return type("Own", (usual,), {})

    def close(self) -> None:
        self.called.append("close")


@dataclass
class Options:
    """The keywords that turn it on."""

    counting: bool = False
    counting_too: bool = False

    def check(self, config: Any) -> None:
        """They go with everything."""


@pytest.fixture(autouse=True)
def options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("folovllm.plugins.OPTIONS", (f"{__name__}:Options",))


def llm(**options: bool) -> LLM:
    fields: dict[str, Any] = {"milestone": "m6", "device": "cpu", "num_kv_blocks": 40, "block_size": 16}
    return LLM(str(tiny_checkpoint()), use_tqdm=False, **fields, **options)


def test_what_it_returns_stands_in_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    with llm() as plain:
        expected = plain.generate("Once upon a time", PARAMS)[0].outputs[0].token_ids
    monkeypatch.setattr(Counts, "called", [])
    monkeypatch.setattr(extensions, "EXTENSIONS", {"counting": f"{__name__}:Counts"})
    with llm(counting=True) as own:
        scheduler, runner = own.engine.scheduler, own.engine.executor._worker.runner  # type: ignore[attr-defined]
        for part, kind in ((scheduler, Scheduler), (runner, GraphRunner)):
            assert isinstance(part, kind) and type(part).__name__ == "Own"
        assert own.generate("Once upon a time", PARAMS)[0].outputs[0].token_ids == expected
    assert Counts.called[0] == "prepare" and Counts.called[-2:] == ["scheduler of 40 blocks", "close"]
    assert {"num_samples", "attention_backend", "graph_runner"} <= {*Counts.called}


def test_two_at_once_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extensions, "EXTENSIONS", dict.fromkeys(("counting", "counting_too"), f"{__name__}:Counts"))
    with pytest.raises(ValueError, match="counting and counting_too do not work together"):
        llm(counting=True, counting_too=True)


def test_a_package_of_which_only_bytecode_is_left_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone" / "__pycache__").mkdir(parents=True)
    monkeypatch.setattr(folovllm, "__path__", [*folovllm.__path__, str(tmp_path)])
    assert is_installed("folovllm.electives.server.cli") and not is_installed("folovllm.gone.cli")


def test_without_structured_output_a_request_for_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("folovllm.engine.llm_engine.STRUCTURED_OUTPUT", "folovllm.gone.matchers")
    with llm() as engine:
        assert len(engine.generate("Once", PARAMS)[0].outputs[0].token_ids) == 6
        with pytest.raises(ValueError, match="not installed"):
            engine.generate("Once", SamplingParams(structured_outputs=folovllm.StructuredOutputsParams(choice=["a"])))
