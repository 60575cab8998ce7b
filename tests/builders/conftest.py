"""Whose components these tests are about: a learner's, or, where there is no `mine/` in play, the course's references."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from folovllm.learn import builders
from folovllm.learn import overlay as _overlay
from milestones.manifest import Course
from milestones.mine import Mine

COURSE = Course(Path(__file__).resolve().parents[2])


@pytest.fixture(scope="package", autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The `mine/` in which components are looked for, here and in ranks."""
    if mine := os.environ.get("FOLOVLLM_MINE"):
        yield Path(mine)
        return
    references = tmp_path_factory.mktemp("references")
    for builder in COURSE.builders:
        Mine(COURSE, references).write(builder.path, builder.reference.read_text("utf-8"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FOLOVLLM_MINE", str(references))
        patch.setattr(sys, "meta_path", [_overlay.Overlay(references), *sys.meta_path])
        yield references


@pytest.fixture(scope="module")
def component(request: pytest.FixtureRequest, folder: Path) -> Any:
    """What the test's module is about, by its name: test_block_manager.py gets `BlockManager`."""
    name = request.path.stem.removeprefix("test_")
    if not (folder / "folovllm" / "learn" / "builders" / f"{name}.py").is_file():
        pytest.skip(f"{name} is not begun here: `python -m milestones build` says how")
    try:
        return builders.load(name)
    except ValueError as error:  # what it lacks is said in a sentence; where that is found out is no help
        pytest.fail(str(error), pytrace=False)
