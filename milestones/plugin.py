"""pytest's side of the course: `--mine`, `--slow`, a marker from each folder, and a report in terms of exercises.

Loaded by `-p milestones.plugin`, before anything imports folovllm. `--mine` sets `FOLOVLLM_MINE`, so that children have
it too; a test during which a module of `mine/` came from elsewhere is an error, for it tested something else.
"""

import gc
import json
import os
import re
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from milestones.failures import told
from milestones.manifest import Course
from milestones.mine import Mine
from milestones.tasks import EXERCISE_ID, PACKAGE, Exercise, covers

EXERCISE = "exercise"  # the user property of a report that carries an exercise's id


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("course")
    group.addoption("--mine", action="store_true", help="test what you wrote in mine/, not the reference")
    group.addoption(
        "--slow", action="store_true", help="run what is marked slow, too (a file that is named is run whole)"
    )
    group.addoption("--course-report", metavar="FILE", help="write {test: [outcome, exercise]} to FILE, as JSON")


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    if not (early_config.known_args_namespace.mine or os.environ.get("FOLOVLLM_MINE")):
        return
    course = Course.here(early_config.rootpath)
    folder = Path(os.environ.setdefault("FOLOVLLM_MINE", str(Mine.of(course).folder))).absolute()
    os.environ["FOLOVLLM_MINE"] = str(folder)  # children may run elsewhere
    if not (folder / PACKAGE).is_dir():  # a hint before the first start makes the folder alone
        raise pytest.UsageError(f"there is no {folder / PACKAGE}: create it with `python -m milestones start m1`")
    try:
        Mine(course, folder).refuse_outdated()
        Mine(course, folder).refuse_broken()
    except ValueError as error:
        raise pytest.UsageError(str(error)) from error


def pytest_configure(config: pytest.Config) -> None:
    course = Course.here(config.rootpath)
    try:
        config.pluginmanager.register(Report(config, course), "course-report")
    except ValueError as error:
        raise pytest.UsageError(str(error)) from error


def pytest_itemcollected(item: pytest.Item) -> None:
    """A test in tests/m3/ has the marker m3, unless it has a milestone's marker of its own; so in tests/x1/ and tests/course/."""
    if any(re.fullmatch(r"[mx]\d+", marker.name) for marker in item.iter_markers()):
        return
    for folder in item.path.parent.parts[len(item.config.rootpath.parts) :]:
        if re.fullmatch(r"[mx]\d+|course", folder):
            item.add_marker(folder)


@pytest.hookimpl(tryfirst=True)
def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With `-m m3`, a file of another folder is read only if it marks a test by hand: to import all takes half a minute."""
    wanted = str(config.getoption("markexpr"))
    if not re.fullmatch(r"[mx]\d", wanted) or not collection_path.match("test_*.py") or wanted in collection_path.parts:
        return None
    by_hand = re.search(rf"mark\.{wanted}\b|getattr\(pytest\.mark", collection_path.read_text("utf-8"))
    return None if by_hand else True


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is marked slow, unless it is asked for: by `--slow`, or by the name of its file.

    With `--slow` it comes first: of several processes, one would wait for the last long test of another.
    """
    if config.getoption("slow") or "slow" in str(config.getoption("markexpr")):
        items.sort(key=lambda item: item.get_closest_marker("slow") is None)
        return
    named = {Path(argument.split("::")[0]).name for argument in config.args}
    slow = [item for item in items if item.get_closest_marker("slow") and item.path.name not in named]
    config.hook.pytest_deselected(items=slow)
    items[:] = [item for item in items if item not in slow]


def exercise_in(error: BaseException | None, known: set[str]) -> str | None:
    """The id of the unwritten exercise that an exception, or one that it comes from, names. Kernels' errors come wrapped."""
    seen: set[int] = set()
    queue = [error]
    while queue:
        error = queue.pop()
        if error is None or id(error) in seen:
            continue
        seen.add(id(error))
        for found in re.finditer(rf"\b({EXERCISE_ID}): \w", str(error)):
            if found[1] in known:
                return found[1]
        queue += [error.__cause__, error.__context__, *getattr(error, "exceptions", ())]
    return None


class Report:
    """Watches one session. Where there is no `mine/` in play, it only names exercises in failures."""

    def __init__(self, config: pytest.Config, course: Course) -> None:
        self.course, self.config = course, config
        folder = os.environ.get("FOLOVLLM_MINE")
        self.mine = Mine(course, Path(folder)) if folder else None
        own = folder or os.environ.get("FOLOVLLM_MINI")
        self.own = Path(own).absolute() if own else None  # where the learner's files are
        self.known = {id for e in course.exercises for id in e.ids} if self.mine else set()
        self.missing = [e for e in course.exercises if self.mine and self.mine.missing(e)]
        self.header = self._header()
        self.outcomes: dict[str, tuple[str, str | None]] = {}

    def pytest_report_header(self) -> str:
        return self.header

    def _header(self) -> str:
        if not self.mine:
            return "testing: the reference"
        parts = []
        for milestone in (m for m in self.course.milestones if m.id in self.mine.state.started):
            done = sum(map(self.mine.written, milestone.exercises))
            parts.append(f"{done} of {len(milestone.exercises)} {milestone.id} exercises written")
        return f"testing: {self.mine.folder} ({', '.join(parts) or 'no milestone started'})"

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Where the learner's file is gone, the tests of its exercise would pass on the reference."""
        for exercise in self.missing:
            if any(covers(test, item.nodeid) for test in exercise.tests):
                pytest.fail(f"{exercise.id}: missing", pytrace=False)

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> None:
        if self.mine:
            from folovllm.learn.overlay import strays

            if found := list(strays(self.mine.folder)):
                pytest.fail(
                    f"this was not your code: {', '.join(f'{m} came from {f}' for m, f in found)}", pytrace=False
                )

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
        if call.excinfo and self.mine:
            # A task that an unwritten exercise ended is logged when it is collected. In the middle of `ast.parse`, which the
            # report needs, that is a SystemError of Python 3.11 (CPython's issue 106905).
            gc.collect()
        report = yield
        id = exercise_in(call.excinfo.value, self.known) if call.excinfo else None
        if id and self.mine:
            exercise = self.course.exercise(id)
            report.user_properties.append((EXERCISE, exercise.id))
            names = self.mine.blanks(exercise) or [symbol.name for symbol in exercise.symbols]
            gone = self.mine.missing(exercise)
            report.longrepr = gone or f"{exercise.id} {', '.join(names)} is not written yet: {self._where(exercise)}"
        elif call.excinfo and self.own and report.failed and self.config.option.tbstyle == "auto":
            tests = self.config.rootpath / "tests"
            report.longrepr = told(call.excinfo.value, self.own, tests) or report.longrepr
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            id = next((str(value) for name, value in report.user_properties if name == EXERCISE), None)
            self.outcomes[report.nodeid] = (report.outcome, id)

    def pytest_sessionfinish(self) -> None:
        file = self.config.getoption("course_report")
        if file and not hasattr(self.config, "workerinput"):
            Path(file).write_text(json.dumps(self.outcomes))

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        rows = list(self._rows()) if self.mine else []
        if rows:
            terminalreporter.section("your exercises")
            for row in rows:
                terminalreporter.write_line(row)

    def _rows(self) -> Iterator[str]:
        """Per exercise that did not pass: its id and symbols, what is the matter, where, and the command for a hint."""
        unwritten = {id for _, id in self.outcomes.values() if id}
        failed = {node for node, (outcome, id) in self.outcomes.items() if outcome == "failed" and not id}
        for exercise in self.course.exercises:
            broken = any(covers(test, node) for test in exercise.tests for node in failed)
            if exercise.id in unwritten or broken:
                state = "not written" if exercise.id in unwritten else "failing"
                yield f"{exercise}  {state}  {self._where(exercise)}  python -m milestones hint {exercise.id}"

    def _where(self, exercise: Exercise) -> str:
        """As `Mine.where`, from the working directory on."""
        assert self.mine
        return os.path.relpath(self.mine.where(exercise))
