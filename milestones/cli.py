"""`python -m milestones`: where you are, and everything a learner does beside writing code."""

import sys
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.cells import set_cell_size
from rich.console import Console
from rich.markdown import Markdown
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from milestones import builders_cli, splice, trace
from milestones.check import FIRST_FAILURE, run_tests, state_of, verdict
from milestones.explain import commented, print_commented
from milestones.language import in_language, t, translated
from milestones.manifest import Builder, Course, Exercise
from milestones.mine import Mine
from milestones.update import update as update_mine

COLOURS = {"passing": "green", "failing": "red", "missing": "red", "not written": "yellow"}
POLL = 0.5  # seconds between two looks at mine/ by `watch`

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")
app.add_typer(builders_cli.app)
console = Console(highlight=False, width=None if sys.stdout.isatty() else 140)

Id = Annotated[str, typer.Argument(metavar="ID", help="An exercise, say m3.1.")]
MilestoneId = Annotated[str, typer.Argument(metavar="ID", help="A milestone, say m3, or an elective, say x1.")]


def main() -> None:
    """Run a command; a user's error is one sentence and exit status 2."""
    try:
        in_language(app)()
    except ValueError as error:
        said = t("error: {error}", error=error)
        Console(stderr=True, highlight=False).print(Text(said, style="bold red"), soft_wrap=True)
        sys.exit(2)


def _mine() -> Mine:
    return Mine.of(Course.here())


def _started(mine: Mine) -> list[Exercise]:
    return [e for m in mine.course.milestones if m.id in mine.state.started for e in m.exercises]


def _newest(mine: Mine) -> str:
    """The last that was started, in the order of the course; m1 if nothing was."""
    return next((m.id for m in reversed(mine.course.milestones) if m.id in mine.state.started), "m1")


def _refuse_unstarted(mine: Mine, id: str) -> None:
    """Raise ValueError for a milestone, or an exercise of one, that was not started: its tests would pass on the reference."""
    if (milestone := id.partition(".")[0]) not in mine.state.started:
        raise ValueError(
            t(
                "{id} is not started, the tests would test the reference: python -m milestones start {id}",
                id=milestone,
            )
        )


def _say(text: str, **values: object) -> None:
    """A line in the reader's language, with these values in its braces."""
    console.print(t(text, **values), soft_wrap=True)


@app.callback(invoke_without_command=True)
def where(context: typer.Context) -> None:
    """The course: you write bodies in mine/, and the real engine runs them.

    Without a command: where you are, and the next step.
    """
    if context.invoked_subcommand:
        return
    mine = _mine()
    state, milestones = mine.state, mine.course.milestones
    if not milestones:
        raise ValueError(t("{folder} has no milestones", folder=mine.course.root))
    for milestone in milestones:
        done = sum(map(mine.written, milestone.exercises)) if milestone.id in state.started else 0
        bar = "■" * done + "□" * (len(milestone.exercises) - done)
        started = "" if milestone.id in state.started else t("not started")
        _say(f"[bold]{milestone.id}[/] {set_cell_size(t(milestone.title), 32)} {bar}  {started}")
    todo = next((e for e in _started(mine) if not mine.written(e)), None)
    failed = [e.id for e in _started(mine) if e.id in state.failed and mine.written(e)]
    newest = max((i for i, m in enumerate(milestones) if m.id in state.started), default=-1)
    ahead = next((m for m in (*milestones[newest + 1 :], *milestones) if m.id not in state.started), None)
    console.print()
    for id in failed:
        _say("[red]{id}[/] is written, and failed when its tests last ran: python -m milestones test {id}", id=id)
    if todo:
        lines = t("{n} line" if todo.lines == 1 else "{n} lines", n=todo.lines)
        _say("Next: [bold]{id}[/] {title}, about {lines}", id=todo.id, title=t(todo.title), lines=lines)
        if gone := mine.missing(todo):
            _say(f"  [red]{gone}[/]")
        for symbol in todo.symbols:
            _say("  write   {name}  {place}", name=symbol.name, place=mine.line(symbol))
        _say("  task    python -m milestones task {id}", id=todo.id)
        _say("  test    python -m milestones test {id}", id=todo.id)
        _say("  stuck   python -m milestones hint {id}", id=todo.id)
    elif state.started and not failed:
        newest_id = _newest(mine)
        said = "{id} has passed. After a change:" if newest_id in state.passed else "Does it hold?"
        _say(
            "All that you started is written. {said}  python -m milestones test {id}",
            said=t(said, id=newest_id),
            id=newest_id,
        )
    if ahead and not todo:
        _say("Next: python -m milestones start {id}  ({summary})", id=ahead.id, summary=t(ahead.summary))
    own = next((b for b in mine.course.builders if b.milestone == _newest(mine)), None)
    if own and state.started and not todo and not (mine.folder / own.path).is_file():
        _say(
            "Beside it, if you like: python -m milestones build {id}  ({title}, {minutes} minutes)",
            id=own.milestone,
            title=t(own.title),
            minutes=own.minutes,
        )


@app.command()
def start(id: MilestoneId) -> None:
    """Bring a milestone's files into mine/, bodies cut out. What you wrote is never touched."""
    mine = _mine()
    for line in mine.start(id):
        _say(f"  {line}")
    if (mine.course.root / (chapter := mine.course.milestone(id).chapter)).is_file():
        chapter = str(translated(mine.course.root / chapter).relative_to(mine.course.root))
        _say("  {chapter}: to read; `make docs` builds the whole book into site/", chapter=chapter)
    below = [m for m in mine.course.milestones if m.id in mine.state.started and mine.course.milestone(id).is_after(m)]
    earlier = [e.id for m in below for e in m.exercises if not mine.written(e)]
    if earlier:
        _say("[yellow]Not written yet, and {id} builds on it: {earlier}[/]", id=id, earlier=", ".join(earlier))
    _say("Your files are in {folder}. Next: python -m milestones", folder=mine.folder)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def test(
    context: typer.Context,
    id: Annotated[
        str,
        typer.Argument(metavar="[ID]", help="A milestone, an exercise or a builder (m3.builder); the newest started."),
    ] = "",
) -> None:
    """Run the tests of a milestone or an exercise on your code. Further arguments go to pytest.

    Those of an exercise stop at the first failure; --maxfail=99 shows all. With the last exercise of a milestone the
    whole milestone's tests run too.
    """
    mine = _mine()
    id = id or _newest(mine)
    if id.endswith(".builder"):
        raise typer.Exit(_test_builder(mine, mine.course.builder(id), context.args))
    exercise = mine.course.exercise(id) if "." in id else None
    tests = [*FIRST_FAILURE, *exercise.tests] if exercise else mine.course.tests(id)
    _refuse_unstarted(mine, id)
    status, _ = run_tests(mine, [*tests, *context.args])
    if exercise and not context.args:
        _remember(mine, exercise, status)
    if exercise and status == 0 and not context.args:
        _say(_explained(exercise))
        status = _whole_milestone(mine, exercise)
    elif status == 0 and not context.args:
        _passes(mine, id)
    raise typer.Exit(status)


def _remember(mine: Mine, exercise: Exercise, status: int) -> None:
    """Note whether what was written for an exercise failed, for those who only ask where they are."""
    if status not in (0, 1):  # pytest did not get as far as the tests
        return
    state, others = mine.state, {*mine.state.failed} - {exercise.id}
    state.failed = sorted({*others, exercise.id} if status and mine.written(exercise) else others)
    mine.save(state)


def _explained(exercise: Exercise) -> str:
    return t("Why the reference does it so: python -m milestones explain {id}", id=exercise.id)


def _test_builder(mine: Mine, builder: Builder, arguments: list[str]) -> int:
    """Run the tests of a learner's component; pytest's status. ValueError where it is not begun."""
    if not (mine.folder / builder.path).is_file():
        said = "{path} is not in {folder}: python -m milestones build {id}"
        raise ValueError(t(said, path=builder.path, folder=mine.folder, id=builder.milestone))
    status, _ = run_tests(mine, [*FIRST_FAILURE[:1], *builder.tests, *arguments])
    if status == 0 and not arguments:
        said = "[green]{title}: yours passes.[/] What is it worth?  python -m milestones score {id}"
        _say(said, title=t(builder.title), id=builder.milestone)
    return status


def _whole_milestone(mine: Mine, exercise: Exercise) -> int:
    """Run all tests of a milestone when its last exercise has passed, until they have passed once; pytest's status.

    They take minutes, so the other exercises' own tests, which take seconds, are asked first.
    """
    state, id = mine.state, exercise.id.partition(".")[0]
    exercises = mine.course.milestone(id).exercises
    if id in state.passed or not all(map(mine.written, exercises)):
        return 0
    others = [e for e in exercises if e != exercise]
    nodes = list(dict.fromkeys(test for e in others for test in e.tests))
    outcomes = run_tests(mine, ["-q", *FIRST_FAILURE[1:], *nodes], quiet=True)[1] if nodes else {}
    failing = [e.id for e in others if verdict(mine, e, outcomes) == "failing"]
    for other in failing:
        _say("All of {id} is written, but [red]{other}[/] fails: python -m milestones test {other}", id=id, other=other)
    if failing:
        return 1
    console.print()
    _say(
        "That was the last exercise of {id}. Now all tests of {id}, in which your code works together (minutes):", id=id
    )
    status, _ = run_tests(mine, mine.course.tests(id))
    if status == 0:
        _passes(mine, id)
    return status


def _passes(mine: Mine, id: str) -> None:
    """Keep in mind that all tests of a milestone have passed, and say so."""
    state = mine.state
    state.passed = sorted({*state.passed, id})
    mine.save(state)
    _say("[green]{id} passes, all of it.[/] Next: python -m milestones", id=id)


@app.command()
def watch(
    id: Annotated[str, typer.Argument(metavar="[ID]", help="An exercise; the next unwritten if left out.")] = "",
) -> None:
    """Run the current exercise's tests whenever you save; on to the next when they pass. Ends with Ctrl-C."""
    mine, seen = _mine(), -1.0
    queue = [mine.course.exercise(id)] if id else [e for e in _started(mine) if not mine.written(e)]
    if id:
        _refuse_unstarted(mine, id)
    try:
        while queue:
            newest = max((file.stat().st_mtime for file in mine.folder.rglob("*.py")), default=0.0)
            if newest == seen:
                time.sleep(POLL)
                continue
            seen, exercise = newest, queue[0]
            console.rule(f"{exercise} · {mine.line(exercise.symbols[0])}")
            status, _ = run_tests(mine, [*FIRST_FAILURE, "-q", "--no-header", *exercise.tests])
            _remember(mine, exercise, status)
            if status == 0 and mine.written(exercise):
                _say("[green]{exercise} passes.[/] {why}", exercise=exercise, why=_explained(exercise))
                _whole_milestone(mine, exercise)
                queue, seen = queue[1:], -1.0
    except KeyboardInterrupt:
        return
    _say("Nothing left to watch. Next: python -m milestones")


@app.command()
def hint(id: Id, all: Annotated[bool, typer.Option("--all", help="All three.")] = False) -> None:
    """One more hint each time: a nudge, the approach, nearly the code."""
    mine = _mine()
    state, builder = mine.state, mine.course.builder(id) if id.endswith(".builder") else None
    rungs = mine.course.hints(builder or mine.course.exercise(id))
    shown = len(rungs) if all else min(state.hints.get(id, 0) + 1, len(rungs))
    for heading, text in rungs[:shown]:
        console.print(Markdown(f"### {heading}\n\n{text}"))
        console.print()
    state.hints[id] = max(shown, state.hints.get(id, 0))
    mine.save(state)
    answer = (
        t("one way is in {file}", file=builder.reference)
        if builder
        else t("python -m milestones show {id} has the answer", id=id)
    )
    more = t("the same command gives the next") if shown < len(rungs) else answer
    _say("{shown} of {all} hints; {more}", shown=shown, all=len(rungs), more=more)


@app.command()
def task(id: Id) -> None:
    """What an exercise asks: the docstrings of its functions."""
    course = Course.here()
    exercise = course.exercise(id)
    console.print(Markdown(f"### {exercise.id} {t(exercise.title)}"))
    for symbol, statement in zip(exercise.symbols, course.statements(exercise), strict=True):
        console.print()
        console.print(Text(f"{symbol.path}: {symbol.name}", style="cyan"), soft_wrap=True)
        said = Text(statement)  # a docstring: its stars are products
        said.highlight_regex(r"`[^`]+`", "cyan")
        console.print(said)


@app.command()
def show(
    id: Id,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    paste: Annotated[bool, typer.Option("--paste", help="Put it into mine/ too; yours goes to mine/.backup.")] = False,
) -> None:
    """The reference's answer, after asking."""
    mine = _mine()
    exercise = mine.course.exercise(id)
    if not yes:
        typer.confirm(t("Show the reference's answer to {exercise}?", exercise=exercise), abort=True)
    for symbol in exercise.symbols:
        source = mine.course.source(symbol.path)
        function = splice.find(source, symbol.name)
        _say(f"{symbol.path}:{function.line}")
        text = "\n".join(source.split("\n")[function.start : function.end])
        console.print(
            Syntax(text, "python", background_color="default") if console.is_terminal else Text(text), soft_wrap=True
        )
    if paste:
        _say("pasted; what was there is in {folder}", folder=mine.paste(exercise))


@app.command()
def explain(
    id: Id, anyway: Annotated[bool, typer.Option("--anyway", help="Also while your own does not pass.")] = False
) -> None:
    """The reference's answer, line by line: why it is so, and what the usual wrong turns are. Once your own passes."""
    mine = _mine()
    exercise = mine.course.exercise(id)
    if not anyway and (state := state_of(mine, exercise)) != "passing":
        raise ValueError(
            t(
                "your {id} is {state}, and this would give the answer away: "
                "python -m milestones hint {id} says less, and --anyway shows it all the same",
                id=id,
                state=t(state),
            )
        )
    for function in commented(mine.course, exercise):
        print_commented(console, function)
    _say("*Names* are those of known mistakes, which are in {folder}", folder=mine.course.wrong_folder(exercise))
    if mine.written(exercise):
        _say("Yours: {places}", places=", ".join(map(mine.line, exercise.symbols)))


@app.command()
def status(
    no_tests: Annotated[bool, typer.Option("--no-tests", help="Only what is written, at once.")] = False,
) -> None:
    """Run the tests of all that you started, and show how far you are."""
    mine = _mine()
    started, hints = _started(mine), mine.state.hints
    nodes = list(dict.fromkeys(test for e in started if mine.written(e) for test in e.tests))
    outcomes = run_tests(mine, ["-q", *nodes], quiet=True)[1] if nodes and not no_tests else {}
    for milestone in mine.course.milestones:
        if milestone.id not in mine.state.started:
            _say("{id} {title}: not started", id=milestone.id, title=t(milestone.title))
            continue
        table = Table(title=f"{milestone.id} {t(milestone.title)}", title_justify="left", expand=False)
        for column in ("exercise", "", "difficulty", "hints", "state"):
            table.add_column(t(column))
        for exercise in milestone.exercises:
            state = verdict(mine, exercise, outcomes)
            state = "written" if no_tests and state == "not run" else state
            used = str(hints.get(exercise.id, "")) or "-"
            colour = COLOURS.get(state, "dim")
            shown = f"[{colour}]{t(state)}[/]"
            table.add_row(exercise.id, t(exercise.title), "●" * exercise.difficulty, used, shown)
        console.print(table)
    for gone in dict.fromkeys(filter(None, map(mine.missing, started))):
        _say(f"[red]{gone}[/]")


@app.command()
def reset(id: Id, yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False) -> None:
    """Cut one exercise out again. What you wrote goes to mine/.backup."""
    mine = _mine()
    exercise = mine.course.exercise(id)
    if not yes:
        typer.confirm(t("Start {exercise} afresh?", exercise=exercise), abort=True)
    _say("{exercise} is blank again; what was there is in {folder}", exercise=exercise, folder=mine.reset(exercise))


@app.command()
def update() -> None:
    """After the reference changed: fresh files in mine/, with your bodies and your other changes put back.

    An exercise that has moved to another file or has another name takes along what you wrote.
    """
    for line in update_mine(_mine()) or [t("mine/ is up to date")]:
        _say(line)


@app.command()
def read(id: MilestoneId) -> None:
    """The code as of a milestone: what one request runs through, in call order.

    + is new since the milestone before; an id at the end says that it is an exercise.
    """
    course = Course.here()
    milestone = course.milestone(id)
    before = [m for m in course.milestones if milestone.is_after(m)][-1:]
    known = {(s.file, s.name) for m in before for s in trace.read(course, m)}
    exercises = {(str(symbol.path), symbol.name): e.id for e in course.exercises for symbol in e.symbols}
    phase = ""
    for step in trace.read(course, milestone):
        if step.phase != phase:
            phase = step.phase
            console.print()
            _say(f"[bold]{t(phase)}[/]")
        new = before and (step.file, step.name) not in known
        line = Text(f"{'+' if new else ' '} {'  ' * min(step.depth, 12)}{step.name}", style="green" if new else "")
        line.append(f"  {Path(step.file)}:{step.line}", style="cyan").append(f"  {step.summary}", style="dim")
        line.append(f"  {exercises.get((step.file, step.name), '')}", style="yellow")
        line.rstrip()
        console.print(line, soft_wrap=True)
