"""A learner's engine in a process of its own, for `mini score` and `mini record`: no engine's modules are there, and it may die.

result = call(Job("score", "mine/mini", stage=5))
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from milestones.language import t
from milestones.say import say

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 300  # seconds


@dataclass(frozen=True, slots=True)
class Job:
    """What the process is to do: count, and measure if `seconds`; or record."""

    kind: str  # score or record
    folder: str
    stage: int
    seconds: bool = False
    threads: int = 1


@dataclass(slots=True)
class Result:
    """What came of it; `error` is a sentence about what the engine did wrong."""

    error: str = ""
    counts: dict[str, int] | None = None
    speed: float | None = None
    steps: int = 0
    recording: str = ""


def call(job: Job, limit: float = LIMIT) -> Result:
    """Do a job in a child. An engine that hangs, or ends its process, is a sentence in the result."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "result.json"
        paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
        command = [sys.executable, "-m", "milestones.mini.alone", json.dumps(asdict(job)), str(file)]
        sys.stdout.flush()
        try:
            status = subprocess.run(command, env=os.environ | {"PYTHONPATH": paths}, timeout=limit).returncode
        except subprocess.TimeoutExpired:
            return Result(t("the engine was still running after {limit} seconds", limit=limit))
        if file.is_file():
            return Result(**json.loads(file.read_text("utf-8")))
    return Result(t("the engine's process ended before its work was done, status {status}", status=status))


def work(job: Job) -> Result:
    """Do a job here."""
    import torch

    from milestones.mini import harness, score
    from milestones.mini.ledger import Rejected

    torch.set_num_threads(job.threads)
    result, folder = Result(), Path(job.folder)
    trace = harness.Trace(score.limits(job.stage), score.workload())
    if job.kind == "score":
        say("counted: {whose}", whose=t("yours"))
    try:
        adapters = harness.load(folder)
    except ValueError as error:
        return Result(str(error))
    try:
        harness.play(adapters, score.STORIES, trace, job.stage)
        if job.seconds:
            say("timed, three times: {whose}", whose=t("yours"))
            result.speed = score.speed(folder, job.stage)
    except Rejected as error:
        result.error = str(error)
    except NotImplementedError as error:
        result.error = t("not written yet: {error}", error=error)
    except (Exception, SystemExit) as error:  # the engine's own: its lines are to be seen
        sys.excepthook(type(error), error, error.__traceback__)
        result.error = f"{type(error).__name__}: {error}"
    result.counts, result.steps = trace.counts, len(trace.steps)
    if job.kind == "record" and trace.steps:
        result.recording = score.recording_of(trace, job.stage)
    return result


def main() -> None:
    """Do the job that the first argument says, and write the result to the file that the second names."""
    from milestones.mini import harness, score

    for module in (harness, score):
        assert module  # the harness is loaded before the engines go
    sys.modules.update(dict.fromkeys(harness.ENGINES))  # type: ignore[arg-type]  # so an import of one fails
    job, file = Job(**json.loads(sys.argv[1])), Path(sys.argv[2])
    result = work(job)
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.flush()
    file.write_text(json.dumps(asdict(result)), encoding="utf-8")


if __name__ == "__main__":
    main()
