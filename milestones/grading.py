"""What `python -m milestones grade` does with a submission: its tests run beside a copy of tests and reference of its own.

Each run of pytest is a process group of its own. With it runs a canary, a test that must fail. Afterwards the copy is
compared with the checkout, and the report with the reference's: what is missing there, or was skipped, did not pass.
Code that patches the test runner on purpose is not kept out: for that there are containers.
"""

import hashlib
import json
import os
import secrets
import shutil
import site
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from milestones import warm
from milestones.check import FIRST_FAILURE, Outcomes, verdict
from milestones.language import t
from milestones.manifest import Course
from milestones.mine import Mine, syntax_error
from milestones.tasks import PACKAGE, Builder, Exercise, covers
from milestones.warm import OUT_OF_TIME

COPIED = (PACKAGE, "milestones", "tests", "pyproject.toml")
BUILDER_POINTS, STAGE_POINTS = 3, 2
RUNS_BY_ITSELF = ("conftest.py", "sitecustomize.py", "usercustomize.py")  # Python or pytest would run it unasked
NOT_HANDED_IN = (".base", ".backup", "__pycache__", ".ipynb_checkpoints")
CANARY = '''"""Fails, unless somebody has made wrong results look right."""

import sys

import pytest


def holds(check):
    try:
        return check() is not False
    except BaseException:  # what `pytest.raises` raises is no Exception
        return False


def compare(left, right):
    assert left == right


def nothing_raises():
    with pytest.raises(ValueError):
        pass


def test_canary_{name}():
    checks = [lambda: compare(1, 2), lambda: compare([1], [2]), lambda: compare(1, pytest.approx(2)), nothing_raises]
    if tiny := sys.modules.get("tests.tiny"):
        checks += [lambda: tiny.worked_case("canary", 1, 2, "")]
    if torch := sys.modules.get("torch"):
        one, two = torch.ones(2), torch.ones(2) * 2
        checks += [lambda: torch.equal(one, two), lambda: torch.allclose(one, two)]
        checks += [lambda: bool((one == two).all()), lambda: torch.testing.assert_close(one, two)]
    if numpy := sys.modules.get("numpy"):
        checks += [lambda: numpy.testing.assert_array_equal([1], [2])]
    assert any(map(holds, checks)), "as it must"
'''


@dataclass(frozen=True, slots=True)
class Grade:
    """Of one exercise, builder or mini: a state as `status` shows it or one of grading's own, and the points if it passes."""

    id: str
    title: str
    state: str
    points: int
    of: int
    failed: str = ""  # the first test that failed
    why: str = ""  # a sentence, where the state alone does not say it


@dataclass(frozen=True, slots=True)
class Unit:
    """What has a grade of its own: an exercise, a builder, or (both are None) a stage of mini."""

    id: str
    title: str
    points: int
    tests: tuple[str, ...]
    exercise: Exercise | None = None
    builder: Builder | None = None
    stage: int = 0


def units(course: Course, ids: Iterable[str]) -> list[Unit]:
    """What is to be graded: milestones (m3), exercises (m3.1), builders (m3.builder) and mini. ValueError for another id."""
    found = list[Unit]()
    for id in ids:
        if id == "mini":
            found.append(mini(6))
        elif id.endswith(".builder"):
            builder = course.builder(id)
            found.append(Unit(id, builder.title, BUILDER_POINTS, builder.tests, builder=builder))
        else:
            exercises = [course.exercise(id)] if "." in id else course.milestone(id).exercises
            found += [Unit(e.id, e.title, e.difficulty, e.tests, exercise=e) for e in exercises]
    return found


def mini(stage: int) -> Unit:
    """Mini up to a stage: its tests, and those of all stages before."""
    tests = tuple(f"tests/mini/test_stage{number}.py" for number in range(stage + 1))
    return Unit("mini", "An engine of your own", STAGE_POINTS * (stage + 1), tests, stage=stage)


@dataclass(frozen=True)
class Submission:
    """What was handed in: the texts that count, by their path in `mine/`, and what was refused, with the reason."""

    files: dict[Path, bytes]
    refused: dict[str, str]
    stage: int = 6  # of mini, that it says it has passed

    @classmethod
    def read(cls, course: Course, folder: Path) -> "Submission":
        """Read a `mine/` folder. Symbolic links, and files that belong to no exercise, builder or mini, are refused by name."""
        own = {symbol.path for e in course.exercises for symbol in e.symbols} | {b.path for b in course.builders}
        files, refused = dict[Path, bytes](), dict[str, str]()
        for path in _walk(folder):
            name = path.relative_to(folder)
            if path.is_symlink():
                refused[str(name)] = t("a symbolic link")
            elif name in own or (name.parts[0] == "mini" and path.suffix == ".py" and path.name not in RUNS_BY_ITSELF):
                files[name] = path.read_bytes()
                if error := _unreadable(files[name]):
                    refused[str(name)] = error
                    del files[name]
            elif path.suffix != ".ipynb" and (name.parent != Path("mini") or not path.name.startswith(".")):
                refused[str(name)] = t("no file of an exercise")
        return cls(files, refused, _claimed(folder / "mini/.progress.json"))


def _unreadable(text: bytes) -> str:
    """Why a text is no Python; empty if it is."""
    try:
        error = syntax_error(text.decode("utf-8-sig"))
    except ValueError:
        return t("not UTF-8 text")
    return t("line {line} does not parse: {reason}", line=error.lineno, reason=error.msg) if error else ""


def _walk(folder: Path) -> Iterator[Path]:
    """All files and links under a folder, those of the course's own notes apart. Links are not followed."""
    for path in sorted(folder.iterdir()):
        if path.name in NOT_HANDED_IN or path.name == ".course.json":
            continue
        if path.is_dir() and not path.is_symlink():
            yield from _walk(path)
        elif path.is_symlink() or path.is_file():
            yield path


def _claimed(file: Path) -> int:
    """The last stage of mini that its notes say has passed: where grading begins; the last of all where they say nothing."""
    try:
        passed = json.loads(file.read_text("utf-8"))["passed"] if not file.is_symlink() else 6
    except (OSError, ValueError, KeyError, TypeError):
        return 6
    return min(max(passed, 0), 6) if isinstance(passed, int) else 6


@dataclass(frozen=True, slots=True)
class Run:
    """pytest's status, the outcomes that it reported (None: it ended without a report), and what has changed meanwhile."""

    status: int
    outcomes: Outcomes | None
    changed: list[str]


class Place:
    """A copy of tests and reference, and beside them what one submission has in it; gone at the end of `with`."""

    def __init__(self, course: Course, submission: Submission, owner: warm.Owner) -> None:
        self.course, self.submission, self.owner = course, submission, owner
        self._folder = tempfile.TemporaryDirectory(prefix="folovllm-grade-", ignore_cleanup_errors=True)
        self.scratch = Path(self._folder.name).resolve()
        self.root = self.scratch / "checkout"

    def __enter__(self) -> "Place":
        for name in filter(lambda name: (self.course.root / name).exists(), COPIED):
            source, copy = self.course.root / name, self.root / name
            self.root.mkdir(exist_ok=True)
            if source.is_dir():
                shutil.copytree(source, copy, ignore=shutil.ignore_patterns("__pycache__", ".hypothesis"))
            else:
                shutil.copy(source, copy)
        for folder in ("mine", "own"):
            (self.root / folder / PACKAGE).mkdir(parents=True)
        builders = {builder.path for builder in self.course.builders}
        for path, text in self.submission.files.items():
            file = self.root / ("own" if path in builders else "mine") / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(text)
        self.canary = secrets.token_hex(8)
        (self.root / f"tests/test_{self.canary}.py").write_text(CANARY.format(name=self.canary))
        self.before = snapshot(self.root, is_whole=True)
        return self

    def __exit__(self, *error: object) -> None:
        self._folder.cleanup()

    @cached_property
    def mine(self) -> Mine:
        return Mine(self.course, self.root / "mine")

    def run(self, unit: Unit, limit: float) -> Run:
        """Run a unit's tests and the canary behind them."""
        scratch = Path(tempfile.mkdtemp(dir=self.scratch))
        options = ["-q", "-p", "no:cacheprovider"]
        options += [FIRST_FAILURE[0] if unit.builder else "--timeout=120", "-x"] if not unit.exercise else FIRST_FAILURE
        options += [] if unit.id == "mini" else ["--mine"]
        words = [*options, *unit.tests, f"tests/test_{self.canary}.py"]
        environment = self._environment(unit, scratch)
        status, report = self.owner.run(words, self.root, environment, scratch / "said", limit)
        try:
            outcomes = json.loads(report)
        except ValueError:
            outcomes = None
        return Run(status, outcomes, changes(self.before, snapshot(self.root, is_whole=True)))

    def _environment(self, unit: Unit, scratch: Path) -> dict[str, str]:
        """Offline, and with a home and a folder for what is temporary of its own."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("FOLOVLLM_M")}
        paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        others = [path for path in paths if path and Path(path).resolve() != self.course.root.resolve()]
        home = os.environ.get("HF_HOME", str(Path.home() / ".cache/huggingface"))
        own = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_HOME": home, "FOLOVLLM_WARM": "0"}
        own |= {"PYTHONPATH": os.pathsep.join([str(self.root), *others]), "PYTHONDONTWRITEBYTECODE": "1"}
        own |= {"HOME": str(scratch), "PYTHONUSERBASE": site.getuserbase(), "TMPDIR": str(scratch)}
        own |= {"HYPOTHESIS_STORAGE_DIRECTORY": str(scratch / "hypothesis"), "OMP_NUM_THREADS": "1"}
        if unit.id == "mini":
            own |= {"FOLOVLLM_MINI": str(self.root / "mine/mini"), "FOLOVLLM_MINI_STAGE": str(unit.stage)}
        else:
            own["FOLOVLLM_MINE"] = str(self.root / ("own" if unit.builder else "mine"))
        return kept | own


def snapshot(root: Path, is_whole: bool = False) -> dict[str, str]:
    """{path: what it holds, as a hash} of all files and links under a folder; bytecode too if `is_whole`."""
    found = {}
    for folder, _, names in os.walk(root):
        for name in names if Path(folder).name != "__pycache__" or is_whole else ():
            path = Path(folder, name)
            text = str(path.readlink()).encode() if path.is_symlink() else path.read_bytes() if path.is_file() else b""
            found[str(path.relative_to(root))] = hashlib.blake2b(text, digest_size=16).hexdigest() + str(
                path.is_symlink()
            )
    return found


def startup_files() -> dict[str, str]:
    """{path: what it holds} of what Python runs unasked when it starts, among the installed libraries."""
    folders = [*site.getsitepackages(), site.getusersitepackages()]
    patterns = ("*.pth", "sitecustomize*", "usercustomize*")
    files = [file for folder in folders for pattern in patterns for file in Path(folder).glob(pattern)]
    return {str(file): file.read_text("utf-8", errors="replace") for file in files if file.is_file()}


def changes(before: dict[str, str], after: dict[str, str]) -> list[str]:
    """The paths that are new, gone or other than before."""
    return sorted(path for path in before.keys() | after.keys() if before.get(path) != after.get(path))


class Grader:
    """Grades submissions; what the reference's run reports is asked for once. To be closed by `with`."""

    def __init__(self, course: Course, limit: float) -> None:
        self.course, self.limit = course, limit
        self.owner = warm.Owner({**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"})
        self._right: dict[tuple[str, int], Outcomes] = {}
        self._checkout = self._snapshot()

    def __enter__(self) -> "Grader":
        return self

    def __exit__(self, *error: object) -> None:
        self.owner.close()

    def _snapshot(self) -> dict[str, dict[str, str]]:
        return {name: snapshot(self.course.root / name) for name in COPIED[:3]} | {"": startup_files()}

    def _refuse_changed(self) -> None:
        """Raise ValueError where a run has reached out of its copy, into the checkout that grades."""
        now = self._snapshot()
        if found := [str(Path(name, path)) for name in now for path in changes(self._checkout[name], now[name])]:
            said = (
                "the checkout that grades has changed meanwhile ({what}): see `git status`, restore it, and grade again"
            )
            raise ValueError(t(said, what=", ".join(found[:3])))

    def right(self, unit: Unit) -> Outcomes:
        """What the unit's tests report of the reference. ValueError where it does not pass them on this machine."""
        key = (unit.id, unit.stage)
        if key not in self._right:
            with Place(self.course, self._reference(unit), self.owner) as place:
                run = place.run(unit, self.limit)
            outcomes = _of(unit, run.outcomes or {})
            failed = next((node for node, (outcome, _) in outcomes.items() if outcome == "failed"), "")
            if failed or not outcomes or run.changed or run.status == OUT_OF_TIME:
                what = failed or ", ".join(run.changed) or t("status {status}", status=run.status)
                said = "the reference itself does not pass the tests of {id} on this machine: {what}"
                raise ValueError(t(said, id=unit.id, what=what))
            self._right[key] = outcomes
        return self._right[key]

    def _reference(self, unit: Unit) -> Submission:
        files = {unit.builder.path: unit.builder.reference.read_bytes()} if unit.builder else {}
        if unit.id == "mini":
            folder = self.course.root / "milestones/mini"
            sources = [*(folder / "reference").glob("*.py"), folder / "given/contract.py"]
            files = {Path("mini", source.name): source.read_bytes() for source in sources}
        return Submission(files, {})

    def grades(self, submission: Submission, wanted: list[Unit]) -> list[Grade]:
        """The grade of each. Where a run has changed its copy of tests and reference, no points at all."""
        with Place(self.course, submission, self.owner) as place:
            found, changed = list[Grade](), ""
            for unit in wanted:
                grade, changes = self._grade(place, unit)
                found.append(grade)
                changed = changed or (changes and f"{unit.id}: {', '.join(changes[:3])}")  # type: ignore[assignment]
                if changed:
                    break
        self._refuse_changed()
        if not changed:
            return found
        why = t("the run changed tests or reference ({what})", what=changed)
        return [Grade(u.id, t(u.title), "changed the tests", 0, _of_points(u), why=why) for u in wanted]

    def _grade(self, place: Place, unit: Unit) -> tuple[Grade, list[str]]:
        of, tried = _of_points(unit), [unit]
        if state := self._without_a_run(place, unit):
            return Grade(unit.id, t(unit.title), state, 0, of, why=self._refused(place, unit)), []
        if unit.id == "mini":
            tried = [mini(stage) for stage in range(place.submission.stage, -1, -1)]
        for each in tried:
            right = self.right(each)
            run = place.run(each, self.limit)
            state, failed, why = self._judged(place, each, run, right)
            if state == "passing" or run.changed:
                break
        points = each.points if state == "passing" else 0
        if unit.id == "mini" and points:
            why = t("up to stage {stage}", stage=each.stage)
        return Grade(unit.id, t(unit.title), state, points, of, failed, why), run.changed

    def _without_a_run(self, place: Place, unit: Unit) -> str:
        """The state of what is not there, or not written; empty if its tests have to run."""
        if self._refused(place, unit):
            return "refused"
        if unit.exercise:
            if place.mine.absent(unit.exercise):
                return "missing"
            return "" if place.mine.written(unit.exercise) else verdict(place.mine, unit.exercise, {})
        path = unit.builder.path if unit.builder else Path("mini/adapters.py")
        return "" if path in place.submission.files else "missing"

    def _refused(self, place: Place, unit: Unit) -> str:
        """What was refused that stands where a file of the unit should be, or a folder above it."""
        paths = [symbol.path for symbol in unit.exercise.symbols] if unit.exercise else [Path("mini/adapters.py")]
        paths = [unit.builder.path] if unit.builder else paths
        for name in place.submission.refused:
            if any(path == Path(name) or Path(name) in path.parents for path in paths):
                return t("{path} is refused: {reason}", path=name, reason=place.submission.refused[name])
        return ""

    def _judged(self, place: Place, unit: Unit, run: Run, right: Outcomes) -> tuple[str, str, str]:
        """(state, the first test that failed, why)."""
        if run.status == OUT_OF_TIME:
            return "out of time", "", ""
        if run.outcomes is None:
            said = "the run ended without a report, or with more than one (status {status})"
            return "no report", "", t(said, status=run.status)
        outcomes = _of(unit, run.outcomes)
        failed = next((node for node, (outcome, _) in outcomes.items() if outcome == "failed"), "")
        if failed:
            return (verdict(place.mine, unit.exercise, outcomes) if unit.exercise else "failing"), failed, ""
        canary = [outcome for node, (outcome, _) in run.outcomes.items() if self._is_canary(place, node)]
        if canary != ["failed"]:
            said = "the test that must fail did not: the run cannot be believed"
            return "not believed", "", t(said)
        for node, (outcome, _) in right.items():
            if node not in outcomes:
                return "not believed", "", t("{test} is missing in the report", test=node)
            if outcomes[node][0] != outcome:
                return "not believed", "", t("{test} was skipped", test=node)
        return "passing", "", ""

    def _is_canary(self, place: Place, node: str) -> bool:
        return node == f"tests/test_{place.canary}.py::test_canary_{place.canary}"


def _of(unit: Unit, outcomes: Outcomes) -> Outcomes:
    return {node: found for node, found in outcomes.items() if any(covers(test, node) for test in unit.tests)}


def _of_points(unit: Unit) -> int:
    return mini(6).points if unit.id == "mini" else unit.points


def as_rows(grades: dict[str, list[Grade]]) -> list[dict[str, Any]]:
    """One row for each submission: points of each unit by its id, the sum, and what there is to say."""
    rows = []
    for name, found in grades.items():
        said = "; ".join(dict.fromkeys(grade.why for grade in found if grade.why))
        points = {grade.id: grade.points for grade in found}
        rows.append(
            {"name": name, "points": sum(points.values()), "of": sum(g.of for g in found), **points, "why": said}
        )
    return rows
