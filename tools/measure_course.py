"""Seconds of what a learner types, on this machine: `start`, each exercise's `test` twice, `update`, `mini test 0`.

    python -m tools.measure_course                    M1 to M6
    python -m tools.measure_course m1.1 m6            an exercise, a milestone
    FOLOVLLM_WARM=spawn python -m tools.measure_course   on Linux, as it is on Windows and macOS, where nothing can fork

It works in a copy of the checkout, over the reference's answers. A `*` marks what takes longer than the course promises: 3 s
for the second `test` of an exercise of M1 to M5, and 15 s for those of m6.6 to m6.10. Between two tests it waits for as long
as a learner needs to look at the first one's result (`--pause`). Ends with 1 if a command failed, whatever it took.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from milestones.manifest import Course

ROOT = Path(__file__).resolve().parents[1]
COPIED = ("folovllm", "milestones", "tests", "notebooks", "docs", "pyproject.toml")
RANKS = {f"m6.{number}" for number in range(6, 11)}


class Learner:
    """Types commands in a copy of the checkout, and keeps what failed."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.failed = folder, list[str]()
        for name in COPIED:
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            copy(ROOT / name, folder / name)

    def types(self, *words: str, printed: bool = True) -> float:
        """Run `python -m milestones` with these words; returns its seconds."""
        environment = os.environ | {"PYTHONPATH": str(self.folder), "FOLOVLLM_LANG": "en"}
        command, start = [sys.executable, "-m", "milestones", *words], time.perf_counter()
        done = subprocess.run(command, cwd=self.folder, env=environment, capture_output=True, text=True)
        seconds = time.perf_counter() - start
        if done.returncode:
            self.failed.append(" ".join(words))
            print(done.stdout[-3000:], done.stderr[-3000:])
        if printed:
            print(f"{' '.join(words):24}{seconds:7.1f}", flush=True)
        return seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ids", nargs="*", default=[f"m{number}" for number in range(1, 7)])
    parser.add_argument("--pause", type=float, default=10, help="seconds before each test (default: 10)")
    options = parser.parse_args()
    course, slow = Course(ROOT), 0
    exercises = [
        e for id in options.ids for e in ([course.exercise(id)] if "." in id else course.milestone(id).exercises)
    ]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        learner = Learner(Path(folder))
        for id in dict.fromkeys(exercise.milestone for exercise in exercises):
            learner.types("start", id)
            learner.types("show", id, "--yes", "--paste", printed=False)
        learner.types("update")
        learner.types("build", "mini")
        for file in (ROOT / "milestones/mini/reference").glob("*.py"):
            shutil.copy(file, learner.folder / "mine/mini")
        learner.types("mini", "test", "0")
        print(f"\n{'test':24}{'first':>7}{'second':>8}")
        for exercise in exercises:
            seconds = []
            for _ in range(2):
                seconds.append(learner.types("test", exercise.id, "-q", printed=False))
                time.sleep(options.pause)
            limit = 15 if exercise.id in RANKS else 3 if exercise.milestone < "m6" else float("inf")
            mark = "*" * (seconds[1] > limit)
            slow += bool(mark)
            print(f"{exercise.id:24}{seconds[0]:7.1f}{seconds[1]:8.1f} {mark}", flush=True)
    load = f", load {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""
    print(f"\n{slow} of {len(exercises)} take longer than promised ({sys.platform}, {os.cpu_count()} cores{load})")
    print(*(f"failed: {words}" for words in learner.failed), sep="\n")
    return bool(learner.failed)


if __name__ == "__main__":
    sys.exit(main())
