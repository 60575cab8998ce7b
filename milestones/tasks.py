"""What the course consists of: exercises, wrong answers, builders, and the milestones that have them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from milestones.language import read_text

PACKAGE = "folovllm"
EXERCISE_ID = r"[mx]\d+\.\d+"  # of a milestone, or of an elective


@dataclass(frozen=True, slots=True)
class Symbol:
    """A function or method of the engine."""

    module: str
    name: str  # qualified: BlockManager.allocate

    @property
    def path(self) -> Path:
        return Path(*self.module.split(".")).with_suffix(".py")

    def __str__(self) -> str:
        return f"{self.module}:{self.name}"


@dataclass(frozen=True, slots=True)
class Exercise:
    id: str
    title: str
    symbols: tuple[Symbol, ...]
    difficulty: int
    lines: int
    needs: tuple[str, ...]
    tests: tuple[str, ...]
    was: tuple[str, ...] = ()  # ids of exercises that are now part of it: a learner's stubs and commands may say them
    clauses: Mapping[str, str] = field(
        default_factory=dict, hash=False
    )  # words of the statement: the test that holds one to them

    @property
    def milestone(self) -> str:
        """The id of the milestone that has it."""
        return self.id.partition(".")[0]

    @property
    def ids(self) -> tuple[str, ...]:
        """All that it is called by."""
        return (self.id, *self.was)

    def __str__(self) -> str:
        return f"{self.id} {', '.join(symbol.name for symbol in self.symbols)}"


@dataclass(frozen=True, slots=True)
class WrongAnswer:
    """A plausible bug: `source` defines some of the exercise's symbols, `why` says what is wrong with them."""

    exercise: Exercise
    file: Path
    why: str
    source: str

    @property
    def id(self) -> str:
        return self.file.stem

    @property
    def title(self) -> str:
        """Its name in words: what stands behind the exercise's id in the file's."""
        return self.id.partition("_")[2].replace("_", " ")


@dataclass(frozen=True, slots=True)
class Builder:
    """A whole component that a learner writes. What else it consists of is in the milestone's folder `builder/`."""

    milestone: str
    title: str
    name: str  # of the file in mine/folovllm/learn/builders/, and what `EngineConfig.builders` says of it
    symbol: str  # what the engine looks for in that file
    protocol: str  # module:qualified name
    tests: tuple[str, ...]
    scorer: str  # module:function
    minutes: int  # beside those of the milestone
    target: str  # the one number of the scorer's that counts
    medals: tuple[float, ...]  # its value for bronze, silver and gold; falling where less is better
    folder: Path

    def medal(self, score: Mapping[str, float]) -> str:
        """The best medal whose value a score reaches; empty if it reaches none."""
        sign = 1 if self.medals[-1] > self.medals[0] else -1
        reached = sum(sign * score[self.target] >= sign * value for value in self.medals)
        return ("", "bronze", "silver", "gold")[reached]

    @property
    def id(self) -> str:
        return f"{self.milestone}.builder"

    @property
    def path(self) -> Path:
        """Of the learner's file, in `mine/`."""
        return Path(PACKAGE, "learn", "builders", f"{self.name}.py")

    @property
    def statement(self) -> str:
        """What to build, what is given, what the tests check, how it is scored."""
        return read_text(self.folder / "task.md").strip()

    @property
    def reference(self) -> Path:
        return self.folder / "reference.py"

    @property
    def wrong(self) -> tuple[Path, ...]:
        """Files with plausible bugs, which the tests reject."""
        return tuple(sorted((self.folder / "wrong").glob("*.py")))

    def __str__(self) -> str:
        return f"{self.id} {self.symbol}"


@dataclass(frozen=True, slots=True)
class Milestone:
    id: str
    title: str
    summary: str
    preset: str
    minutes: int
    exercises: tuple[Exercise, ...]
    folder: Path
    notebook: str = ""
    chapter: str = ""
    flags: tuple[str, ...] = ()  # of an elective: what switches on what it adds, in any later preset
    builder: Builder | None = None
    more_chapters: tuple[str, ...] = ()
    more_notebooks: tuple[str, ...] = ()

    @property
    def chapters(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.chapter, *self.more_chapters)))

    @property
    def notebooks(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.notebook, *self.more_notebooks)))

    @property
    def is_elective(self) -> bool:
        """Whether it has no preset of its own, and comes at any time after the milestones."""
        return self.id.startswith("x")

    def is_after(self, other: "Milestone") -> bool:
        """Whether it builds on the other: electives do on all milestones, and on no other elective."""
        if self.is_elective or other.is_elective:
            return not other.is_elective
        return rank(self.id) > rank(other.id)


def rank(id: str) -> tuple[bool, int]:
    """Where a milestone stands among all: electives are behind."""
    return id.startswith("x"), int(id[1:])


def covers(test: str, node: str) -> bool:
    """Whether a node id lies under a manifest's entry, which may name a file, a class or a function without parameters."""
    return node == test or node.startswith((f"{test}::", f"{test}[", f"{test}/"))
