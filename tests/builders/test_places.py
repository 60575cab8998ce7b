"""Where a component stands: chosen by one field, refused in a sentence, the same in every rank."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from folovllm import LLM, EngineConfig
from folovllm.learn import builders
from folovllm.learn.builders import BUILDERS
from milestones.manifest import Course
from tests.builders.engines import WITHOUT_MINE, texts

pytestmark = WITHOUT_MINE
COURSE = Course(Path(__file__).resolve().parents[2])


@contextmanager
def written(name: str, folder: Path, change: Callable[[str], str | None]) -> Iterator[None]:
    """Within this, the component's file holds something else, or is gone."""
    file, module = folder / f"folovllm/learn/builders/{name}.py", f"folovllm.learn.builders.{name}"
    kept = file.read_text("utf-8")
    text = change(kept)
    sys.modules.pop(module, None)
    try:
        file.unlink()
        if text is not None:
            file.write_text(text, encoding="utf-8")
        yield
    finally:
        file.write_text(kept, encoding="utf-8")
        sys.modules.pop(module, None)


def test_manifest_and_engine_know_the_same() -> None:
    assert {b.name: b.symbol for b in COURSE.builders} == {n: p.symbol for n, p in BUILDERS.items()}


@pytest.mark.parametrize(
    ("builder", "milestone", "says"),
    [
        ("decode_loop", "m1", 'model_impl="native"'),
        ("decode_loop", "m3", 'milestone="m1"'),
        ("scheduler", "m1", 'milestone="m2"'),
        ("scheduler", "m3", 'kv_cache="slots"'),
        ("block_manager", "m2", 'milestone="m3"'),
        ("block_manager", "m5", "enable_prefix_caching=False"),
        ("prefill", "m4", 'attention_backend="triton"'),
        ("prefix_cache", "m4", "enable_prefix_caching=True"),
        ("graph_cache", "m5", "enforce_eager=False"),
    ],
)
def test_a_preset_without_the_place_refuses(builder: str, milestone: str, says: str) -> None:
    with pytest.raises(ValueError, match=f"the builder '{builder}' .*{says}"):
        EngineConfig.for_milestone(milestone, builders=builder)


def test_priorities_are_not_passed_over() -> None:
    with pytest.raises(ValueError, match='scheduling="fcfs"'):
        EngineConfig.for_milestone("m2", builders="scheduler", scheduling="priority")


def test_an_unknown_name() -> None:
    with pytest.raises(ValueError, match=r"unknown builder 'blocks': choose one of decode_loop, "):
        EngineConfig(builders="blocks")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "there is no folovllm/learn/builders/block_manager.py"),
        ("x = 1", "has no BlockManager"),
        (
            "from folovllm.cache.manager import KVCacheManager\nclass BlockManager(KVCacheManager): ...",
            "lacks: allocate_slots, free, ",
        ),
    ],
    ids=["no file", "no class", "methods missing"],
)
def test_what_is_not_there_is_said_before_any_work(text: str | None, says: str, folder: Path) -> None:
    with written("block_manager", folder, lambda reference: text), pytest.raises(ValueError, match=says):
        LLM("stories-5m", milestone="m3", builders="block_manager", use_tqdm=False)


def test_an_import_that_fails_inside_is_not_hidden(folder: Path) -> None:
    with (
        written("scheduler", folder, lambda reference: "import no_such_package"),
        pytest.raises(ModuleNotFoundError, match="no_such_package"),
    ):
        builders.load("scheduler")


def test_two_at_once() -> None:
    config: dict[str, Any] = {"milestone": "m6", "block_size": 4, "num_kv_blocks": 64, "max_num_seqs": 4}
    assert texts(6, 3, **config, builders="prefix_cache, graph_cache") == texts(6, 3, **config)


@pytest.mark.slow
@pytest.mark.usefixtures("warm")
def test_ranks_have_the_same_component(folder: Path) -> None:
    """Two processes over gloo, each of which asks its graph cache for captured steps and says so in a file."""
    log = folder / "ranks"
    says = f"""

class GraphCache(GraphCache):
    def get(self, *arguments):
        import os

        with open({str(log)!r}, "a") as log:
            log.write(f"{{os.getpid()}}\\n")
        return super().get(*arguments)
"""
    config: dict[str, Any] = {"milestone": "m6", "block_size": 4, "num_kv_blocks": 64, "max_num_seqs": 4}
    with written("graph_cache", folder, lambda reference: reference + says):
        got = texts(4, 2, **config, builders="graph_cache", tensor_parallel_size=2)
    assert got == texts(4, 2, **config), "the tokens of one process, with the engine's own parts"
    processes = set(log.read_text("utf-8").split())
    assert len(processes) == 2 and str(os.getpid()) not in processes, "both ranks replayed what the component keeps"
