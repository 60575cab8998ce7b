"""Run tests on `mine/` in a child process, and say what became of the exercises."""

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from milestones import warm
from milestones.language import t
from milestones.mine import Mine
from milestones.say import console, say
from milestones.tasks import Builder, Exercise, covers
from milestones.warm import OUT_OF_TIME

Outcomes = dict[str, tuple[str, str | None]]  # test: (passed, failed or skipped; the unwritten exercise it met)

FIRST_FAILURE = ("-x", "--timeout=60")  # of an exercise's own tests: a loop without end says so within a minute


def run_tests(
    mine: Mine,
    arguments: Iterable[str],
    quiet: bool = False,
    limit: float | None = None,
    environment: Mapping[str, str] | None = None,
) -> tuple[int, Outcomes]:
    """pytest's exit status and each test's outcome; `quiet` keeps pytest's own words back unless it could not run at all.

    After `limit` seconds it is ended, with the status `OUT_OF_TIME`. `environment` is set beside our own.

    pytest is a fork of a process that has the large libraries (`milestones.warm`), where that can be had.

    Raises ValueError where pytest is not installed.
    """
    if importlib.util.find_spec("pytest") is None:
        said = "the tests need pytest, which `make learn` installs (or: pip install pytest hypothesis pytest-timeout)"
        raise ValueError(t(said))
    with tempfile.TemporaryDirectory() as folder, (Path(folder) / "said").open("w+") as output:
        report, root, out = Path(folder) / "report.json", mine.course.root, output if quiet else None
        words = ["--mine", f"--course-report={report}", *arguments]
        # No bytecode: two saves within a second would look like one to its time stamp.
        own = {"FOLOVLLM_MINE": str(mine.folder), "PYTHONDONTWRITEBYTECODE": "1"}
        variables = {**os.environ, **(environment or {}), **own}
        status = warm.run(words, root, variables, out, limit)
        if status is None:
            command = [sys.executable, "-m", "pytest", *words]
            try:
                done = subprocess.run(command, cwd=root, env=variables, stdout=out, stderr=out, timeout=limit)
                status = done.returncode
            except subprocess.TimeoutExpired:
                status = OUT_OF_TIME
        if quiet and status not in (0, 1, OUT_OF_TIME):
            output.seek(0)
            sys.stderr.write(output.read())
        return status, json.loads(report.read_text()) if report.is_file() else {}


def verdict(mine: Mine, exercise: Exercise, outcomes: Outcomes) -> str:
    """missing, does not parse, not written, passing, failing, blocked (its tests meet another that is not written), or not run."""
    if not mine.written(exercise):
        return "missing" if mine.missing(exercise) else "does not parse" if mine.broken(exercise) else "not written"
    own = [v for node, v in outcomes.items() if any(covers(test, node) for test in exercise.tests)]
    if any(outcome == "failed" and not id for outcome, id in own):
        return "failing"
    if blockers := sorted({id for _, id in own if id}):
        return f"blocked by {', '.join(blockers)}"
    return "passing" if any(outcome == "passed" for outcome, _ in own) else "not run"


def state_of(mine: Mine, exercise: Exercise) -> str:
    """What has become of one exercise, by running its own tests: "not started", or a verdict."""
    if exercise.milestone not in mine.state.started:
        return "not started"
    written = mine.written(exercise)
    outcomes = run_tests(mine, [*FIRST_FAILURE, "-q", *exercise.tests], quiet=True)[1] if written else {}
    return verdict(mine, exercise, outcomes)


def note_outcome(mine: Mine, exercise: Exercise, status: int) -> None:
    """Note whether what was written for an exercise failed, for those who only ask where they are."""
    if status not in (0, 1):  # pytest did not get as far as the tests
        return
    state, others = mine.state, {*mine.state.failed} - {exercise.id}
    state.failed = sorted({*others, exercise.id} if status and mine.written(exercise) else others)
    mine.save(state)


def run_builder(mine: Mine, builder: Builder, arguments: list[str]) -> int:
    """Run the tests of a learner's component; pytest's status. ValueError where it is not begun."""
    if not (mine.folder / builder.path).is_file():
        said = "{path} is not in {folder}: python -m milestones build {id}"
        raise ValueError(t(said, path=builder.path, folder=mine.folder, id=builder.milestone))
    status, _ = run_tests(mine, [*FIRST_FAILURE[:1], *builder.tests, *arguments])
    if status == 0 and not arguments:
        said = "[green]{title}: yours passes.[/] What is it worth?  python -m milestones score {id}"
        say(said, title=t(builder.title), id=builder.milestone)
    return status


def run_milestone(mine: Mine, exercise: Exercise) -> int:
    """Run all tests of a milestone when its last exercise has passed, until they have passed once; pytest's status.

    They take minutes, so the other exercises' own tests, which take seconds, are asked first.
    """
    state, id = mine.state, exercise.milestone
    exercises = mine.course.milestone(id).exercises
    if id in state.passed or not all(map(mine.written, exercises)):
        return 0
    others = [e for e in exercises if e != exercise]
    nodes = list(dict.fromkeys(test for e in others for test in e.tests))
    outcomes = run_tests(mine, ["-q", *FIRST_FAILURE[1:], *nodes], quiet=True)[1] if nodes else {}
    failing = [e.id for e in others if verdict(mine, e, outcomes) == "failing"]
    for other in failing:
        say("All of {id} is written, but [red]{other}[/] fails: python -m milestones test {other}", id=id, other=other)
    if failing:
        return 1
    console.print()
    said = "That was the last exercise of {id}. Now all tests of {id}, in which your code works together (minutes):"
    say(said, id=id)
    status, _ = run_tests(mine, mine.course.tests(id))
    if status == 0:
        note_passed(mine, id)
    return status


def note_passed(mine: Mine, id: str) -> None:
    """Keep in mind that all tests of a milestone have passed, and say so."""
    state = mine.state
    state.passed = sorted({*state.passed, id})
    mine.save(state)
    say("[green]{id} passes, all of it.[/] Next: python -m milestones", id=id)
