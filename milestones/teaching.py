"""`python -m milestones bugs` and `grade`: known mistakes to be found in code, and points for those who teach."""

import json
import os
import re
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from milestones import splice
from milestones.check import FIRST_FAILURE, run_tests, state_of
from milestones.grading import Grade, Grader, Submission, Unit, as_rows, units
from milestones.language import t
from milestones.manifest import Course
from milestones.mine import Mine, mutated, write_variant
from milestones.say import console, errors, print_code, say
from milestones.tasks import PACKAGE, Exercise, WrongAnswer

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


@app.command()
def grade(
    ids: Annotated[
        list[str],
        typer.Argument(metavar="ID...", help="Milestones, exercises, builders or mini: m1 x1.3 m3.builder mini."),
    ],
    folder: Annotated[Path, typer.Option("--folder", help="What was handed in: a mine/ folder.")] = Path("mine"),
    many: Annotated[
        Path | None,
        typer.Option("--class", help="A folder with a folder for each student: its mine/, or what was in it."),
    ] = None,
    jobs: Annotated[int, typer.Option("--jobs", min=1, help="So many at a time; of a class.")] = os.cpu_count() or 1,
    limit: Annotated[int, typer.Option("--limit", help="Seconds for the tests of one exercise.")] = 300,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Points for what was handed in, by this checkout's own tests, each exercise with a limit of time; models are not downloaded.

    An exercise that passes is worth its difficulty, 1 to 3 points; a builder 3, a stage of mini 2. The exit status is 0 whatever the points are.
    """
    course = Course.here()
    wanted = units(course, ids)
    if many:
        _grade_class(course, many, wanted, jobs, limit, as_json)
        return
    submission = Submission.read(course, _handed_in(folder))
    grades = list(graded(course, submission, wanted, limit))
    points, of = sum(g.points for g in grades), sum(g.of for g in grades)
    if as_json:
        found = {"points": points, "of": of, "exercises": [*map(asdict, grades)], "refused": submission.refused}
        print(json.dumps(found, indent=1, ensure_ascii=False))
        return
    for g in grades:
        say("{id} {title}: {state}, {points} of {of}", **asdict(g) | {"state": t(g.state)})
        if g.why:
            console.print(Text(f"  {g.why}"), soft_wrap=True)
    for name, reason in submission.refused.items():
        console.print(Text(t("refused: {name}, {reason}", name=name, reason=reason)), soft_wrap=True)
    say("{points} of {of} points", points=points, of=of)


def graded(course: Course, submission: Submission, wanted: list[Unit], limit: float) -> list[Grade]:
    """The grades of one submission."""
    with Grader(course, limit) as grader:
        return grader.grades(submission, wanted)


def _handed_in(folder: Path) -> Path:
    """A folder that has what `mine/` has. ValueError where it has not."""
    for found in (folder, folder / "mine"):
        if (found / PACKAGE).exists() or (found / "mini").exists():
            return found
    raise ValueError(t("{folder} has no {package}: hand in the whole mine/ folder", folder=folder, package=PACKAGE))


def _grade_class(course: Course, many: Path, wanted: list[Unit], jobs: int, limit: float, as_json: bool) -> None:
    """Grade each folder in a folder, and print a table; who handed in nothing has no points."""
    folders = sorted(path for path in many.iterdir() if path.is_dir()) if many.is_dir() else []
    if not folders:
        raise ValueError(t("{folder} has no folders: one for each student, with a mine/ in it", folder=many))
    grades, refused = dict[str, list[Grade]](), dict[str, dict[str, str]]()
    began = time.monotonic()
    for name, submission, found in _all_graded(course, folders, wanted, jobs, limit):
        grades[name], refused[name] = found, submission.refused
        minutes = (time.monotonic() - began) / 60
        left = minutes / len(grades) * (len(folders) - len(grades))
        of = {"n": len(grades), "all": len(folders), "minutes": f"{minutes:.1f}", "left": f"{left:.1f}", "name": name}
        errors.print(t("{n} of {all} graded ({name}), {minutes} minutes, about {left} left", **of), soft_wrap=True)
    rows = as_rows({folder.name: grades[folder.name] for folder in folders})
    if as_json:
        found_all = [row | {"refused": refused[row["name"]]} for row in rows]
        print(json.dumps({"minutes": round(minutes, 2), "class": found_all}, indent=1, ensure_ascii=False))
        return
    table = Table("", *(unit.id for unit in wanted), t("points"), "", box=None)
    for row in rows:
        gone = t("{n} refused", n=len(refused[row["name"]])) if refused[row["name"]] else ""
        cells = [str(row[unit.id]) for unit in wanted]
        table.add_row(
            row["name"], *cells, f"{row['points']} / {row['of']}", Text("; ".join(filter(None, [row["why"], gone])))
        )
    console.print(table)
    say("{n} submissions, {minutes} minutes", n=len(rows), minutes=f"{minutes:.1f}")


def _all_graded(
    course: Course, folders: list[Path], wanted: list[Unit], jobs: int, limit: float
) -> Iterator[tuple[str, Submission, list[Grade]]]:
    """(name, submission, grades) of each as it is done. All are read before the first runs, so none can change another."""
    read: dict[str, Submission] = {}
    for folder in folders:
        try:
            read[folder.name] = Submission.read(course, _handed_in(folder))
        except ValueError as error:
            read[folder.name] = Submission({}, {str(folder): str(error)})
    with Grader(course, limit) as grader, ThreadPoolExecutor(jobs) as pool:
        for unit in wanted:
            grader.right(unit)
        futures: dict[Any, str] = {pool.submit(grader.grades, each, wanted): name for name, each in read.items()}
        for future in as_completed(futures):
            yield futures[future], read[futures[future]], future.result()
