"""Mini as a course: its stages, their texts, and how far a learner is."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path

from milestones.language import read_sections, t
from milestones.manifest import Course
from milestones.mine import Mine

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PAGE = ROOT / "docs/mini.md"
NOTES, HISTORY = ".progress.json", ".history.json"


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage, as `stages.toml` has it."""

    number: int
    title: str
    writes: str  # the files of the reference that are new in it
    lines: int
    hours: float
    read: str  # a chapter
    surgery: list[str]  # exercises in the real engine that are worth doing afterwards

    @property
    def task(self) -> str:
        """What it asks, in the reader's language: its section of the page."""
        parts = ((h, f"## {h}\n\n{text}") for h, text in read_sections(PAGE))
        return next(part for heading, part in parts if re.match(rf"(Stage|第) {self.number}\b", heading))

    @property
    def hints(self) -> list[tuple[str, str]]:
        """(heading, text) of its three hints, in the reader's language."""
        return read_sections(HERE / f"hints/stage{self.number}.md")


@cache
def stages() -> tuple[Stage, ...]:
    """All of them, in their order."""
    found = tomllib.loads((HERE / "stages.toml").read_text("utf-8"))["stage"]
    return tuple(Stage(number, **fields) for number, fields in enumerate(found))


@dataclass
class Notes:
    """What is kept about a learner, in `mine/mini/.progress.json`."""

    path: str = "mini"  # which of the two paths the course shows: "mini" or "engine"
    passed: int = -1  # the last stage whose tests have passed, with those of all stages before
    hints: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Own:
    """A learner's folder with an engine of their own."""

    folder: Path

    @classmethod
    def here(cls) -> Own:
        """`mine/mini`, whether it exists or not."""
        return cls(Mine.of(Course.here()).folder / "mini")

    @property
    def is_begun(self) -> bool:
        return (self.folder / "adapters.py").is_file()

    @property
    def notes(self) -> Notes:
        """Raises ValueError where the file is damaged."""
        file = self.folder / NOTES
        try:
            return Notes(**json.loads(file.read_text("utf-8"))) if file.is_file() else Notes(path="engine")
        except (ValueError, TypeError) as error:
            raise ValueError(t("{file} is damaged: delete it (nothing that you wrote is lost)", file=file)) from error

    def save(self, notes: Notes) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / NOTES).write_text(json.dumps(asdict(notes), indent=1), encoding="utf-8")

    def begin(self) -> bool:
        """Make the folder, and choose this path. False where it was there: what is in it is left as it is."""
        self.folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(HERE / "given/contract.py", self.folder)
        if self.is_begun:
            return False
        shutil.copy(HERE / "template/adapters.py", self.folder)
        self.save(Notes())
        return True

    def stage(self, number: int | None) -> Stage:
        """The stage with this number, or the one that comes next. Raises ValueError where there is none, and before `build mini`."""
        if not self.is_begun:
            raise ValueError(t("there is no {folder} yet: python -m milestones build mini", folder=self.folder))
        number = min(self.notes.passed + 1, len(stages()) - 1) if number is None else number
        if not 0 <= number < len(stages()):
            raise ValueError(t("mini has stages 0 to {last}, and no {number}", last=len(stages()) - 1, number=number))
        return stages()[number]

    def test(self, stage: Stage, arguments: list[str]) -> int:
        """Run the tests of a stage and of all before it on the learner's engine; pytest's status. Notes what has passed."""
        files = [f"tests/mini/test_stage{number}.py" for number in range(stage.number + 1)]
        environment = {**os.environ, "FOLOVLLM_MINI": str(self.folder), "FOLOVLLM_MINI_STAGE": str(stage.number)}
        environment.pop("FOLOVLLM_MINE", None)
        options = ["-q", "-x", "--no-header", "--timeout=120"]
        command = [sys.executable, "-m", "pytest", *options, *files, *arguments]
        status = subprocess.run(command, cwd=ROOT, env=environment | {"PYTHONDONTWRITEBYTECODE": "1"}).returncode
        notes = self.notes
        if status == 0 and not arguments and stage.number > notes.passed:
            notes.passed = stage.number
            self.save(notes)
        return status
