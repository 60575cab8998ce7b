"""Run tests on `mine/` in a child process, and say what became of the exercises."""

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from milestones.language import t
from milestones.manifest import Exercise
from milestones.mine import Mine
from milestones.plugin import covers

Outcomes = Mapping[str, tuple[str, str | None]]  # test: (passed, failed or skipped; the unwritten exercise it met)

FIRST_FAILURE = ("-x", "--timeout=60")  # of an exercise's own tests: a loop without end says so within a minute


def run_tests(mine: Mine, arguments: Iterable[str], quiet: bool = False) -> tuple[int, Outcomes]:
    """pytest's exit status and each test's outcome; `quiet` keeps pytest's own words back unless it could not run at all.

    Raises ValueError where pytest is not installed.
    """
    if importlib.util.find_spec("pytest") is None:
        raise ValueError(
            t("the tests need pytest, which `make learn` installs (or: pip install pytest hypothesis pytest-timeout)")
        )
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, "-m", "pytest", "--mine", f"--course-report={report}", *arguments]
        # No bytecode: two saves within a second would look like one to its time stamp.
        environment = {**os.environ, "FOLOVLLM_MINE": str(mine.folder), "PYTHONDONTWRITEBYTECODE": "1"}
        done = subprocess.run(command, cwd=mine.course.root, env=environment, capture_output=quiet, text=True)
        if quiet and done.returncode not in (0, 1):
            sys.stderr.write(done.stdout + done.stderr)
        return done.returncode, json.loads(report.read_text()) if report.is_file() else {}


def verdict(mine: Mine, exercise: Exercise, outcomes: Outcomes) -> str:
    """missing, not written, passing, failing, blocked (its tests meet another that is not written), or not run."""
    if not mine.written(exercise):
        return "missing" if mine.missing(exercise) else "not written"
    own = [v for node, v in outcomes.items() if any(covers(test, node) for test in exercise.tests)]
    if any(outcome == "failed" and not id for outcome, id in own):
        return "failing"
    if blockers := sorted({id for _, id in own if id}):
        return f"blocked by {', '.join(blockers)}"
    return "passing" if any(outcome == "passed" for outcome, _ in own) else "not run"


def state_of(mine: Mine, exercise: Exercise) -> str:
    """What has become of one exercise, by running its own tests: "not started", or a verdict."""
    if exercise.id.partition(".")[0] not in mine.state.started:
        return "not started"
    written = mine.written(exercise)
    outcomes = run_tests(mine, [*FIRST_FAILURE, "-q", *exercise.tests], quiet=True)[1] if written else {}
    return verdict(mine, exercise, outcomes)
