"""`python -m milestones`: where you are, and everything a learner does beside writing code."""

import sys
import time
import tomllib
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markdown import Markdown
from rich.text import Text

from milestones import builders, progress, splice, teaching, trace
from milestones.check import FIRST_FAILURE, note_outcome, note_passed, run_builder, run_milestone, run_tests, state_of
from milestones.explain import print_commented
from milestones.language import in_language, t, translated
from milestones.manifest import Course
from milestones.mine import Mine
from milestones.mini import cli as mini
from milestones.mini.course import Own
from milestones.progress import newest_started, started_exercises
from milestones.say import console, print_any_character, print_code, print_hints, say, say_what_is_left
from milestones.tasks import Builder, Exercise
from milestones.update import update as update_mine

POLL = 0.5  # seconds between two looks at mine/ by `watch`

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")
app.add_typer(builders.app)
app.add_typer(mini.app)
app.add_typer(teaching.app)

Id = Annotated[str, typer.Argument(metavar="ID", help="An exercise, say m3.1.")]
MilestoneId = Annotated[str, typer.Argument(metavar="ID", help="A milestone, say m3, or an elective, say x1.")]


def main() -> None:
    """Run a command; a user's error is one sentence and exit status 2."""
    print_any_character()
    try:
        in_language(app)()
    except ValueError as error:
        said = t("error: {error}", error=error)
        Console(stderr=True, highlight=False).print(Text(said, style="bold red"), soft_wrap=True)
        sys.exit(2)


def _mine() -> Mine:
    return Mine.of(Course.here())


def _refuse_unstarted(mine: Mine, id: str) -> None:
    """Raise ValueError for a milestone, or an exercise of one, that was not started: its tests would pass on the reference."""
    if (milestone := id.partition(".")[0]) not in mine.state.started:
        said = "{id} is not started, the tests would test the reference: python -m milestones start {id}"
        raise ValueError(t(said, id=milestone))


@app.callback(invoke_without_command=True)
def where(context: typer.Context) -> None:
    """The course: you write bodies in mine/, and the real engine runs them.

    Without a command: where you are, and the next step.
    """
    if context.invoked_subcommand != "update":
        _mine().refuse_outdated()
    if not context.invoked_subcommand:
        mini.print_place() if Own.here().notes.path == "mini" else progress.print_place(_mine())


@app.command()
def start(id: MilestoneId) -> None:
    """Bring a milestone's files into mine/, bodies cut out. What you wrote is never touched."""
    mine = _mine()
    for line in mine.start(id):
        say(f"  {line}")
    for chapter in (page for page in mine.course.milestone(id).chapters if (mine.course.root / page).is_file()):
        chapter = str(translated(mine.course.root / chapter).relative_to(mine.course.root))
        say("  {chapter}: to read; `make docs` builds the whole book into site/", chapter=chapter)
    below = [m for m in mine.course.milestones if m.id in mine.state.started and mine.course.milestone(id).is_after(m)]
    earlier = [e.id for m in below for e in m.exercises if not mine.written(e)]
    if earlier:
        say("[yellow]Not written yet, and {id} builds on it: {earlier}[/]", id=id, earlier=", ".join(earlier))
    say("Your files are in {folder}. Next: python -m milestones", folder=mine.folder)


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
    id = id or newest_started(mine)
    if id.endswith(".builder"):
        raise typer.Exit(run_builder(mine, mine.course.builder(id), context.args))
    exercise = mine.course.exercise(id) if "." in id else None
    tests = [*FIRST_FAILURE, *exercise.tests] if exercise else mine.course.tests(id)
    _refuse_unstarted(mine, id)
    status, _ = run_tests(mine, [*tests, *context.args])
    if exercise and not context.args:
        note_outcome(mine, exercise, status)
    if exercise and status == 0 and not context.args:
        say(_explained(exercise))
        status = run_milestone(mine, exercise)
    elif status == 0 and not context.args:
        note_passed(mine, id)
    raise typer.Exit(status)


def _explained(exercise: Exercise) -> str:
    return t("Why the reference does it so: python -m milestones explain {id}", id=exercise.id)


@app.command()
def watch(
    id: Annotated[str, typer.Argument(metavar="[ID]", help="An exercise; the next unwritten if left out.")] = "",
) -> None:
    """Run the current exercise's tests whenever you save; on to the next when they pass. Ends with Ctrl-C."""
    mine, seen = _mine(), -1.0
    queue = [mine.course.exercise(id)] if id else [e for e in started_exercises(mine) if not mine.written(e)]
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
            note_outcome(mine, exercise, status)
            if status == 0 and mine.written(exercise):
                say("[green]{exercise} passes.[/] {why}", exercise=exercise, why=_explained(exercise))
                run_milestone(mine, exercise)
                queue, seen = queue[1:], -1.0
    except KeyboardInterrupt:
        return
    say("Nothing left to watch. Next: python -m milestones")


@app.command()
def hint(id: Id, all: Annotated[bool, typer.Option("--all", help="All three.")] = False) -> None:
    """One more hint each time: a nudge, the approach, nearly the code."""
    mine = _mine()
    state, course = mine.state, mine.course
    task = course.builder(id) if id.endswith(".builder") else course.exercise(id)
    hints, used = course.hints(task), state.hints.get(id, 0)
    shown = print_hints(hints, used, all)
    if isinstance(task, Builder):
        answer = t("one way is in {file}", file=task.reference)
    else:
        answer = t("python -m milestones show {id} has the answer", id=id)
        for name, names in course.in_reach(task).items():
            say("{name} can use: {names}", name=name, names=", ".join(names) or "-")
    state.hints[id] = max(shown, used)
    mine.save(state)
    say_what_is_left(hints, shown, answer)


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
    id: Annotated[str, typer.Argument(metavar="ID", help="An exercise, say m3.1, or a whole milestone.")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    paste: Annotated[bool, typer.Option("--paste", help="Put it into mine/ too; yours goes to mine/.backup.")] = False,
) -> None:
    """The reference's answer, after asking."""
    mine = _mine()
    exercises = (mine.course.exercise(id),) if "." in id else mine.course.milestone(id).exercises
    if not yes:
        asked = ", ".join(map(str, exercises))
        typer.confirm(t("Show the reference's answer to {exercise}?", exercise=asked), abort=True)
    for symbol in (symbol for exercise in exercises for symbol in exercise.symbols):
        function = splice.find(mine.course.source(symbol.path), symbol.name)
        say(f"{symbol.path}:{function.line}")
        print_code(function.text)
    for exercise in exercises if paste else ():
        say("pasted; what was there is in {folder}", folder=mine.paste(exercise))


@app.command()
def explain(
    id: Id, anyway: Annotated[bool, typer.Option("--anyway", help="Also while your own does not pass.")] = False
) -> None:
    """The reference's answer, line by line: why it is so, and what the usual wrong turns are. Once your own passes."""
    mine = _mine()
    exercise = mine.course.exercise(id)
    if not anyway and (state := state_of(mine, exercise)) != "passing":
        said = (
            "your {id} is {state}, and this would give the answer away: "
            "python -m milestones hint {id} says less, and --anyway shows it all the same"
        )
        raise ValueError(t(said, id=id, state=t(state)))
    print_commented(mine.course, exercise)
    say("*Names* are those of known mistakes, which are in {folder}", folder=mine.course.wrong_folder(exercise))
    if mine.written(exercise):
        say("Yours: {places}", places=", ".join(map(mine.line, exercise.symbols)))


@app.command()
def status(
    no_tests: Annotated[bool, typer.Option("--no-tests", help="Only what is written, at once.")] = False,
) -> None:
    """Run the tests of all that you started, and show how far you are."""
    progress.print_status(_mine(), run=not no_tests)


@app.command()
def reset(id: Id, yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False) -> None:
    """Cut one exercise out again. What you wrote goes to mine/.backup."""
    mine = _mine()
    exercise = mine.course.exercise(id)
    if not yes:
        typer.confirm(t("Start {exercise} afresh?", exercise=exercise), abort=True)
    say("{exercise} is blank again; what was there is in {folder}", exercise=exercise, folder=mine.reset(exercise))


@app.command()
def update() -> None:
    """After the reference changed: fresh files in mine/, with your bodies and your other changes put back.

    What you wrote comes along where an exercise has moved, and says today's names. An exercise that asks something else
    is cut out afresh; what you wrote is in mine/.backup.
    """
    for line in update_mine(_mine()) or [t("mine/ is up to date")]:
        say(line)


@app.command("where")
def elsewhere(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A function or class: ours, mini's or vLLM's.")],
) -> None:
    """What one of our symbols is called in mini and in vLLM 0.26, and what vLLM does beside it."""
    symbols = tomllib.loads((Course.here().root / "docs/data/vllm.toml").read_text("utf-8"))["symbol"]
    found = [s for s in symbols if any(name.lower() in s[side].lower() for side in ("ours", "mini", "vllm", "idea"))]
    if not found:
        raise ValueError(t("{name} is in no line of the table: docs/reference/vllm.md has all", name=name))
    for symbol in found:
        console.print()
        console.print(Text(symbol["idea"], style="bold"))
        for engine, side in (("folovllm", "ours"), ("mini", "mini"), ("vLLM", "vllm")):
            console.print(Text(f"  {engine:9}{symbol[side] or '-'}"))
        console.print(Text(f"  {symbol['more']} {symbol.get('also', '')}".rstrip(), style="dim"))


@app.command()
def read(
    id: MilestoneId,
    all: Annotated[bool, typer.Option("--all", help="Also what checks values and files, and reports.")] = False,
) -> None:
    """The code as of a milestone: what one request runs through, in call order; then how the engine was put together.

    Before it stand the files that docs/reading_order.md lists beside these: records, protocols and checks.
    + is new since the milestone before; an id at the end says that it is an exercise.
    """
    course = Course.here()
    milestone = course.milestone(id)
    before = [m for m in course.milestones if milestone.is_after(m)][-1:]
    known = {(s.file, s.name) for m in before for s in trace.read(course, m)}
    exercises = {(str(symbol.path), symbol.name): e.id for e in course.exercises for symbol in e.symbols}
    phase, steps = "", trace.read(course, milestone)
    shown = steps if all else trace.shortened(steps, exercises)
    rest = "" if all else t("; {rest} more that check or report: --all", rest=len(steps) - len(shown))
    files = len({step.file for step in shown})
    say("{shown} functions in {files} files{rest}", shown=len(shown), files=files, rest=rest)
    say("In call order. File by file, from the outside in: docs/reading_order.md")
    if listed := trace.also_listed(course, milestone, shown):
        console.print()
        say("Records, protocols and checks, of which no call is shown: read each where a function first names it")
        for file in listed:
            ids = [id_ for (place, _), id_ in exercises.items() if place == file]
            console.print(Text(f"  {file}", style="cyan").append("  ".join(["", *ids]), style="yellow"), soft_wrap=True)
    for step in shown:
        if step.phase != phase:
            phase = step.phase
            console.print()
            say(f"[bold]{t(phase)}[/]")
        new = before and (step.file, step.name) not in known
        line = Text(f"{'+' if new else ' '} {'  ' * min(step.depth, 12)}{step.name}", style="green" if new else "")
        line.append(f"  {Path(step.file)}:{step.line}", style="cyan").append(f"  {step.summary}", style="dim")
        line.append(f"  {exercises.get((step.file, step.name), '')}", style="yellow")
        line.rstrip()
        console.print(line, soft_wrap=True)
