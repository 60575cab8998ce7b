"""What a notebook's first cell says: whose code is running."""

import os
from pathlib import Path

from milestones.manifest import Course
from milestones.mine import Mine


def running(id: str) -> None:
    """Print "running: yours (3 of 7)" or "running: the reference"; a notebook that lives in mine/ runs what is there.

    Call it before folovllm is imported: it may still set the switch.
    """
    course = Course.here()
    mine = Mine.of(course)
    if Path.cwd().is_relative_to(mine.folder):
        os.environ.setdefault("FOLOVLLM_MINE", str(mine.folder))
    if not os.environ.get("FOLOVLLM_MINE"):
        print("running: the reference")
        return
    mine = Mine(course, Path(os.environ["FOLOVLLM_MINE"]))
    exercises = course.milestone(id).exercises
    print(f"running: yours ({sum(map(mine.written, exercises))} of {len(exercises)})")
