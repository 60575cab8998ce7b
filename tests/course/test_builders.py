"""Builders: what each consists of, and that its tests reject the wrong ones."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from milestones import builders_cli, cli
from milestones.builders import put, put_wrong, scorer, template
from milestones.manifest import Builder, Course
from milestones.mine import Mine

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


class TestCommands:
    """What a learner types, over a folder of its own."""

    @pytest.fixture(autouse=True)
    def mine(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.setattr(Mine, "of", classmethod(lambda cls, course: cls(course, tmp_path / "mine")))
        monkeypatch.setattr(builders_cli, "console", Console(width=200))
        return tmp_path / "mine"

    def run(self, *words: str) -> str:
        done = CliRunner().invoke(cli.app, words)
        if isinstance(done.exception, ValueError):
            raise done.exception
        assert done.exit_code == 0, done.output
        return done.output

    def test_the_list(self) -> None:
        said = self.run("build")
        assert all(builder.title in said and str(builder.minutes) in said for builder in COURSE.builders)

    def test_a_file_is_written_once(self, mine: Path) -> None:
        assert "new, yours to write" in self.run("build", "m3")
        file = mine / "folovllm/builders/block_manager.py"
        assert file.read_text("utf-8") == template(COURSE.builder("m3"), COURSE)
        file.write_text("mine")
        assert "left as it is" in self.run("build", "m3") and file.read_text("utf-8") == "mine"
        assert "folovllm/builders/block_manager.py" in self.run("build")

    def test_hints_come_one_at_a_time(self) -> None:
        assert "1 of 3 hints; the same command gives the next" in self.run("hint", "m3.builder")
        self.run("hint", "m3.builder")
        assert "reference.py" in self.run("hint", "m3.builder")

    def test_scores(self) -> None:
        said = self.run("score", "m3")
        assert "the course's reference" in said and "Yours is not begun" in said

    def test_what_is_not_complete_is_a_sentence(self) -> None:
        self.run("build", "m3")
        with pytest.raises(ValueError, match=r"not complete, it lacks: free, num_free"):
            self.run("score", "m3")

    def test_what_is_not_begun_is_a_sentence(self) -> None:
        with pytest.raises(ValueError, match="python -m milestones build m3"):
            self.run("test", "m3.builder")
        with pytest.raises(ValueError, match=r"no builder 'x1.builder': there are m1, m2"):
            self.run("test", "x1.builder")
