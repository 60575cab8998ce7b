"""Each stored wrong engine is rejected by the tests of its stage, in a sentence that says where it is wrong. Right ones of other shapes pass."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from milestones.mini.harness import HERE
from tests.mini.conftest import Mini

STAGES = range(7)
WRONG = sorted((HERE / "wrong").glob("*.py"))
RIGHT = sorted((HERE / "right").glob("*.py"))


def stage_tests(stage: int) -> Iterator[Callable[[Mini], None]]:
    """The test functions of a stage, in their order."""
    module = importlib.import_module(f"tests.mini.test_stage{stage}")
    yield from (value for name, value in vars(module).items() if name.startswith("test_"))


def complaint(path: Path, stage: int, of: int | None = None) -> str:
    """What the first test of its stage, or `of` an earlier one, that fails says; empty if all pass."""
    for test in stage_tests(stage if of is None else of):
        try:
            test(mini=Mini(path, stage))  # type: ignore[call-arg]
        except (AssertionError, pytest.fail.Exception) as error:
            return f"{test.__name__}: {str(error).splitlines()[0]}"
    return ""


@pytest.mark.parametrize("path", WRONG, ids=lambda path: path.stem)
def test_it_is_rejected_in_a_sentence(path: Path) -> None:
    said = complaint(path, int(path.name[0]))
    assert said, f"no test of stage {path.name[0]} notices {path.stem}"
    assert re.search(r"\d|imports folovllm", said) and len(said.split()) > 6, f"this says too little: {said}"
    print(said)


@pytest.mark.slow
@pytest.mark.parametrize("path", RIGHT, ids=lambda path: path.stem)
def test_another_shape_passes(path: Path) -> None:
    own = int(path.name[0])
    for stage in sorted({1, min(own, 2), own}):
        assert not complaint(path, own, stage)


def test_there_are_three_a_stage() -> None:
    for stage in STAGES:
        files = [path for path in WRONG if path.name.startswith(f"{stage}_")]
        assert len(files) >= 3 and all(path.read_text("utf-8").startswith('"""') for path in files), f"stage {stage}"
