"""The commands around a builder, over a folder of its own."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from milestones import builders, cli
from milestones.builders import template
from milestones.manifest import Course
from milestones.mine import Mine
from tests.builders.engines import WITHOUT_MINE

pytestmark = WITHOUT_MINE
COURSE = Course(Path(__file__).resolve().parents[2])


class TestCommands:
    """What a learner types, over a folder of its own."""

    @pytest.fixture(autouse=True)
    def mine(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.setattr(Mine, "of", classmethod(lambda cls, course: cls(course, tmp_path / "mine")))
        monkeypatch.setenv("FOLOVLLM_MINE", os.environ["FOLOVLLM_MINE"])  # `score` takes it out; afterwards it is back
        monkeypatch.setattr(builders, "console", Console(width=200))
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
        said = self.run("build", "m3")
        assert "new, yours to write" in said and "--milestone m3 --builders block_manager" in said
        file = mine / "folovllm/learn/builders/block_manager.py"
        assert file.read_text("utf-8") == template(COURSE.builder("m3"), COURSE)
        file.write_text("mine")
        assert "left as it is" in self.run("build", "m3") and file.read_text("utf-8") == "mine"
        assert "folovllm/learn/builders/block_manager.py" in self.run("build")

    def test_hints_come_one_at_a_time(self) -> None:
        assert "1 of 3 hints; the same command gives the next" in self.run("hint", "m3.builder")
        self.run("hint", "m3.builder")
        assert "reference.py" in self.run("hint", "m3.builder")

    def test_scores(self) -> None:
        said = self.run("score", "m3")
        assert "the course's reference" in said and "Yours is not begun" in said

    def test_what_is_not_complete_is_a_sentence(self) -> None:
        self.run("build", "m3")
        with pytest.raises(ValueError, match=r"not complete, it lacks: allocate_slots, free, num_free"):
            self.run("score", "m3")

    def test_an_unwritten_exercise_in_its_way_is_named(self, mine: Path) -> None:
        Mine(COURSE, mine).start("m3")
        self.run("build", "m3")
        shutil.copy(COURSE.builder("m3").reference, mine / COURSE.builder("m3").path)
        with pytest.raises(ValueError, match=r"not written: python -m milestones test m\d\.\d"):
            self.run("score", "m3")

    def test_what_is_not_begun_is_a_sentence(self) -> None:
        with pytest.raises(ValueError, match="python -m milestones build m3"):
            self.run("test", "m3.builder")
        with pytest.raises(ValueError, match=r"no builder 'x1.builder': there are m1, m2"):
            self.run("test", "x1.builder")

    def test_a_milestone_that_is_written_names_its_builder(self, mine: Path) -> None:
        own = Mine(COURSE, mine)
        own.start("m3")
        assert "build m3" not in self.run()
        for exercise in COURSE.milestone("m3").exercises:
            own.paste(exercise)
        assert "Beside it, if you like: python -m milestones build m3  (A block manager, 120 minutes)" in self.run()
        self.run("build", "m3")
        assert "build m3" not in self.run()
