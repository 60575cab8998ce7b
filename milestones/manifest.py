"""The course: each `milestone.toml` read into dataclasses. Format: README.md; tests/course/test_exercises.py checks what it says."""

import ast
import json
import tomllib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from milestones import splice
from milestones.language import MARK, language, read_sections, t
from milestones.renames import Change, read_changes
from milestones.tasks import PACKAGE, Builder, Exercise, Milestone, Symbol, WrongAnswer, rank


@dataclass(frozen=True)
class Course:
    """The milestones in order, the electives behind them, the package that they teach, and the folder in which `mine/` stands."""

    root: Path

    @classmethod
    def here(cls, folder: Path | None = None) -> "Course":
        """The course of the nearest checkout at or above `folder`, else the one that this tool belongs to."""
        folder = (folder or Path.cwd()).resolve()
        for root in (folder, *folder.parents):
            if (root / "milestones").is_dir() and (root / PACKAGE).is_dir():
                return cls(root)
        return cls(Path(__file__).resolve().parent.parent)

    @cached_property
    def milestones(self) -> tuple[Milestone, ...]:
        files = (self.root / "milestones").glob("[mx][0-9]*/milestone.toml")
        return tuple(sorted(map(_milestone, files), key=lambda m: rank(m.id)))

    @cached_property
    def changes(self) -> tuple[Change, ...]:
        """The renames and moves of the reference, oldest first."""
        return read_changes(self.root / "milestones" / "renames.toml")

    @property
    def exercises(self) -> tuple[Exercise, ...]:
        return tuple(e for m in self.milestones for e in m.exercises)

    @property
    def builders(self) -> tuple[Builder, ...]:
        return tuple(m.builder for m in self.milestones if m.builder)

    def builder(self, id: str) -> Builder:
        """By the milestone's id, or the builder's own."""
        for builder in self.builders:
            if id in (builder.milestone, builder.id):
                return builder
        known = ", ".join(builder.milestone for builder in self.builders) or t("none")
        raise ValueError(t("no builder '{id}': there are {known}", id=id, known=known))

    def milestone(self, id: str) -> Milestone:
        for milestone in self.milestones:
            if milestone.id == id:
                return milestone
        known = ", ".join(milestone.id for milestone in self.milestones) or t("none")
        raise ValueError(t("no milestone '{id}': there are {known}", id=id, known=known))

    def exercise(self, id: str) -> Exercise:
        for exercise in self.exercises:
            if id in exercise.ids:
                return exercise
        raise ValueError(t("no exercise '{id}': `python -m milestones status` lists them", id=id))

    def onwards(self, *ids: str) -> tuple[Exercise, ...]:
        """The exercises of these, and of all that comes after one of them; after an elective comes nothing."""
        first = [self.milestone(id) for id in ids]
        return tuple(e for m in self.milestones if any(m == f or m.is_after(f) for f in first) for e in m.exercises)

    def tests(self, id: str) -> tuple[str, ...]:
        """pytest's arguments for all tests of a milestone: those in an earlier folder with its marker are its own, too."""
        last = self.milestone(id)
        folders = [f"tests/{m.id}" for m in self.milestones if m == last or last.is_after(m)]
        return ("-m", id, *(folder for folder in folders if (self.root / folder).is_dir()))

    def source(self, path: Path) -> str:
        """The reference's text; `path` begins with the package's name."""
        return (self.root / path).read_text(encoding="utf-8")

    def hints(self, task: Exercise | Builder) -> list[tuple[str, str]]:
        """(heading, text) of each rung, in order."""
        file = "builder/hints.md" if isinstance(task, Builder) else f"hints/{task.id}.md"
        return read_sections(self.milestone(task.milestone).folder / file)

    def in_reach(self, exercise: Exercise) -> dict[str, list[str]]:
        """What the reference's body of each symbol uses of its class and module: for who is stuck."""
        sources = {symbol.name: self.source(symbol.path) for symbol in exercise.symbols}
        return {name: splice.in_reach(source, splice.find(source, name).node) for name, source in sources.items()}

    def statements(self, exercise: Exercise) -> list[str]:
        """What each symbol of an exercise does, in the reader's language: its docstring, or that translated."""
        file = self.milestone(exercise.milestone).folder / f"statements/{exercise.id}.{language()}.md"
        if file.is_file():
            return [text.strip() for text in MARK.split(file.read_text("utf-8"))[1:]]
        nodes = (splice.find(self.source(symbol.path), symbol.name).node for symbol in exercise.symbols)
        return [ast.get_docstring(node) or "" for node in nodes]

    def remarks(self, exercise: Exercise) -> list[tuple[str, str]]:
        """(fragment of the reference's body, what there is to say about it), in the order of the body."""
        sections = read_sections(self.milestone(exercise.milestone).folder / f"explain/{exercise.id}.md")
        return [(heading.strip("`"), text) for heading, text in sections]

    def wrong_answers(self, exercise: Exercise) -> list[WrongAnswer]:
        files = sorted(self.wrong_folder(exercise).glob(f"{exercise.id}_*.py"))
        texts = {file: file.read_text(encoding="utf-8") for file in files}
        return [WrongAnswer(exercise, f, ast.get_docstring(ast.parse(t)) or "", t) for f, t in texts.items()]

    def outputs(self, exercise: Exercise) -> dict[str, dict[str, Any]]:
        """{worked case: {wrong answer: what it gives there}}, of those that give something wrong."""
        file = self.outputs_file(exercise)
        found: dict[str, dict[str, Any]] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        return found

    def outputs_file(self, exercise: Exercise) -> Path:
        return self.wrong_folder(exercise) / f"{exercise.id}.json"

    def wrong_folder(self, exercise: Exercise) -> Path:
        """Where the wrong answers to the exercise are."""
        return self.milestone(exercise.milestone).folder / "wrong"


def _milestone(file: Path) -> Milestone:
    data = tomllib.loads(file.read_text(encoding="utf-8"))
    raw, builders = data.pop("exercise", []), data.pop("builder", [])
    try:
        exercises = tuple(map(_exercise, raw))
        lists = {key: tuple(data.pop(key, ())) for key in ("flags", "more_chapters", "more_notebooks")}
        builder = next((_builder(data["id"], file.parent, **entry) for entry in builders), None)
        return Milestone(**data, **lists, exercises=exercises, folder=file.parent, builder=builder)
    except (TypeError, KeyError) as error:
        raise ValueError(f"{file}: {error}") from error


def _exercise(entry: dict[str, Any]) -> Exercise:
    symbols = tuple(Symbol(*text.split(":")) for text in entry.pop("symbols"))
    needs, tests, was = (tuple(entry.pop(key, ())) for key in ("needs", "tests", "was"))
    return Exercise(symbols=symbols, needs=needs, tests=tests, was=was, **entry)


def _builder(milestone: str, folder: Path, tests: list[str], medals: list[float], **entry: Any) -> Builder:
    return Builder(milestone=milestone, folder=folder / "builder", tests=tuple(tests), medals=tuple(medals), **entry)
