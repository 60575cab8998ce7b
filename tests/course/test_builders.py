"""Builders: what each consists of, and that its tests reject the wrong ones."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from milestones.builders import put, put_wrong, scorer, template
from milestones.manifest import Builder, Course

COURSE = Course(Path(__file__).resolve().parents[2])
each_builder = pytest.mark.parametrize("builder", COURSE.builders, ids=lambda b: b.id)
WRONG = [(builder, file) for builder in COURSE.builders for file in builder.wrong]


def run(builder: Builder, folder: Path) -> subprocess.CompletedProcess[str]:
    """The contract tests over a folder, up to the first failure."""
    words = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--no-header", *builder.tests]
    environment = {**os.environ, "FOLOVLLM_MINE": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(words, cwd=COURSE.root, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize(("builder", "wrong"), WRONG, ids=[f"{b.id}-{f.stem}" for b, f in WRONG])
def test_a_wrong_class_is_rejected(builder: Builder, wrong: Path, tmp_path: Path) -> None:
    done = run(builder, put_wrong(builder, wrong, tmp_path))
    assert done.returncode == 1, f"{', '.join(builder.tests)} do not notice {wrong.name}:\n{done.stdout[-2000:]}"
    assert "AssertionError" in done.stdout or "Error: " in done.stdout, done.stdout[-2000:]
    assert "ImportError" not in done.stdout and "NameError" not in done.stdout, done.stdout[-2000:]


@each_builder
def test_each_has_its_parts(builder: Builder) -> None:
    assert len(builder.wrong) >= 2 and all(file.read_text("utf-8").startswith('"""') for file in builder.wrong)
    assert all((COURSE.root / test).is_file() for test in builder.tests)
    for part in ("## Given", "## The tests", "## The score"):
        assert part in builder.statement, f"the task of {builder.id} has no section {part}"
    hints = COURSE.hints(builder)
    assert len(hints) == 3 and len({text for _, text in hints}) == 3
    assert builder.reference.is_file() and callable(scorer(builder)) and builder.minutes > 0


@each_builder
def test_what_build_writes_is_python_and_solves_nothing(builder: Builder, tmp_path: Path) -> None:
    file = put(template(builder, COURSE), builder, tmp_path) / builder.path
    compile(file.read_text("utf-8"), file, "exec")
    assert run(builder, tmp_path).returncode == 1, "an empty component passes the tests"
