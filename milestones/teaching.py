"""`python -m milestones bugs` and `grade`: known mistakes to be found in code, and points for those who teach."""

import json
import re
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from milestones import splice
from milestones.check import FIRST_FAILURE, Outcomes, run_tests, state_of, verdict
from milestones.language import t
from milestones.manifest import Course
from milestones.mine import Mine, mutated, write_variant
from milestones.say import console, print_code, say
from milestones.tasks import PACKAGE, Exercise, WrongAnswer
from milestones.warm import OUT_OF_TIME

app = typer.Typer()


@app.command()
def bugs(
    id: Annotated[
        str, typer.Argument(metavar="[BUG]", help="An exercise, say m3.2, or one of its bugs, say m3.2a.")
    ] = "",
    hint: Annotated[
        bool, typer.Option("--hint", help="Run the exercise's tests on it: what fails is the hint.")
    ] = False,
    answer: Annotated[bool, typer.Option("--answer", help="What is wrong with it.")] = False,
    anyway: Annotated[bool, typer.Option("--anyway", help="Also while your own does not pass.")] = False,
) -> None:
    """Find the bug: code that looks right, each with one known mistake. For exercises that your own code passes."""
    mine = Mine.of(Course.here())
    exercise_id, letter = re.fullmatch(r"(.*?)([a-z]?)", id).groups() if id else ("", "")  # type: ignore[union-attr]
    if not letter:
        shown = [mine.course.exercise(exercise_id)] if id else mine.course.exercises
        for exercise in shown:
            names = " ".join(lettered(mine.course, exercise))
            say("{id} {title}: {bugs}", id=exercise.id, title=t(exercise.title), bugs=names)
        return
    exercise = mine.course.exercise(exercise_id)
    if (bug := lettered(mine.course, exercise).get(id)) is None:
        said = "no bug '{id}': python -m milestones bugs {exercise} lists them"
        raise ValueError(t(said, id=id, exercise=exercise.id))
    if not anyway and state_of(mine, exercise) != "passing":
        said = "the code is nearly the answer to {id}, which yours does not pass yet; --anyway shows it all the same"
        raise ValueError(t(said, id=exercise.id))
    _print_bug(mine.course, bug)
    if hint:
        with tempfile.TemporaryDirectory() as folder:
            variant = Mine(mine.course, write_variant(mine.course, Path(folder), wrong=[bug]))
            run_tests(variant, [*FIRST_FAILURE, "-q", *exercise.tests])
    if answer:
        console.print(Text(f"{bug.title}: {bug.why}"), soft_wrap=True)
    elif not hint:
        say("stuck?  --hint runs the tests on it, --answer says what is wrong")


def lettered(course: Course, exercise: Exercise) -> dict[str, WrongAnswer]:
    """The wrong answers to an exercise by the names that say nothing about them: m3.2a, m3.2b."""
    return {f"{exercise.id}{chr(ord('a') + i)}": answer for i, answer in enumerate(course.wrong_answers(exercise))}


def _print_bug(course: Course, bug: WrongAnswer) -> None:
    """The functions that it defines, with the reference's signatures and docstrings."""
    defined = dict(splice.functions(bug.source))
    for symbol in (s for s in bug.exercise.symbols if s.name in defined):
        print_code(splice.find(mutated(course.source(symbol.path), symbol, bug), symbol.name).text)
        console.print()


@dataclass(frozen=True, slots=True)
class Grade:
    """Of one exercise: a state as `status` shows it, or "out of time"; its difficulty in points if it passes."""

    id: str
    title: str
    state: str
    points: int
    of: int
    failed: str = ""  # the first test that failed


@app.command()
def grade(
    ids: Annotated[list[str], typer.Argument(metavar="ID...", help="Milestones or exercises: m1 m2 x1.3.")],
    folder: Annotated[Path, typer.Option("--folder", help="What was handed in: a mine/ folder.")] = Path("mine"),
    limit: Annotated[int, typer.Option("--limit", help="Seconds for the tests of one exercise.")] = 300,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Points for what was handed in, by this checkout's own tests, each exercise with a limit of time; models are not downloaded.

    An exercise that passes is worth its difficulty, 1 to 3 points. The exit status is 0 whatever the points are.
    """
    course = Course.here()
    exercises = [e for id in ids for e in ([course.exercise(id)] if "." in id else course.milestone(id).exercises)]
    if not (folder / PACKAGE).is_dir():
        raise ValueError(t("{folder} has no {package}: hand in the whole mine/ folder", folder=folder, package=PACKAGE))
    grades = list(graded(course, folder, exercises, limit))
    points, of = sum(g.points for g in grades), sum(g.of for g in grades)
    if as_json:
        found = {"points": points, "of": of, "exercises": [*map(asdict, grades)]}
        print(json.dumps(found, indent=1, ensure_ascii=False))
        return
    for g in grades:
        say("{id} {title}: {state}, {points} of {of}", **asdict(g) | {"state": t(g.state)})
    say("{points} of {of} points", points=points, of=of)


def graded(course: Course, folder: Path, exercises: list[Exercise], limit: float) -> Iterator[Grade]:
    """Each exercise's grade. Of the folder only the files that hold exercises count, so nothing else can change the tests."""
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    with tempfile.TemporaryDirectory() as place:
        mine = Mine(course, Path(place))
        for path in dict.fromkeys(symbol.path for e in course.exercises for symbol in e.symbols):
            if (folder / path).is_file():
                (mine.folder / path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(folder / path, mine.folder / path)
        for e in exercises:
            status, outcomes = 0, Outcomes()
            if mine.written(e):
                arguments = [*FIRST_FAILURE, "-q", *e.tests]
                status, outcomes = run_tests(mine, arguments, quiet=True, limit=limit, environment=offline)
            state = "missing" if mine.absent(e) else verdict(mine, e, outcomes)
            state = "out of time" if status == OUT_OF_TIME else state
            failed = next((node for node, (outcome, _) in outcomes.items() if outcome == "failed"), "")
            points = e.difficulty if state == "passing" else 0
            yield Grade(e.id, t(e.title), state, points, e.difficulty, failed)
