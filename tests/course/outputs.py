"""`python -m tests.course.outputs [m1 | m1.2 ...]`: store what each wrong answer gives in its exercise's worked cases.

Run it after a change of a worked case or of a wrong answer; the course's tests say where what is stored is out of date.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

from milestones.manifest import Course
from tests.course.farm import Farm, Job, jobs
from tests.tiny import named

Cases = dict[str, dict[str, Any]]  # worked case: {wrong answer: what it gives there}


def main(ids: list[str]) -> None:
    """Run the wrong answers to the exercises chosen, to all if none is, and write a file for each exercise."""
    os.environ["TRITON_INTERPRET"] = "1"  # before the farm loads Triton; so do the course's tests
    course = Course(Path(__file__).resolve().parents[2])
    chosen = [e for e in course.exercises if not ids or e.id in ids or e.id.partition(".")[0] in ids]
    with Farm() as farm:
        wrong = [job for job in jobs(course) if job.exercise in {e.id for e in chosen}]
        farm.submit(wrong)
        for exercise in chosen:
            cases = collected(farm, [job for job in wrong if job.exercise == exercise.id])
            course.outputs_file(exercise).write_text(as_json(cases), encoding="utf-8")
            unnamed = [name for case in cases for name, output in cases[case].items() if not named(case, output)]
            silent = [
                job.wrong
                for job in wrong
                if job.exercise == exercise.id and not any(job.wrong in c for c in cases.values())
            ]
            print(f"{exercise.id}: as others {unnamed}, right in the worked case {silent}", flush=True)


def collected(farm: Farm, wrong: list[Job]) -> Cases:
    """What the wrong answers give instead of what is right."""
    cases: Cases = {}
    for job in wrong:
        for case, output in farm.result(job).missed.items():
            cases.setdefault(case, {})[job.wrong] = output
    return dict(sorted(cases.items()))


def as_json(cases: Cases) -> str:
    """A wrong answer a line."""
    texts = []
    for case, outputs in cases.items():
        rows = ",\n".join(f"    {json.dumps(name)}: {json.dumps(output)}" for name, output in sorted(outputs.items()))
        texts.append(f"  {json.dumps(case)}: {{\n{rows}\n  }}")
    return "{\n" + ",\n".join(texts) + "\n}\n"


if __name__ == "__main__":
    main(sys.argv[1:])
