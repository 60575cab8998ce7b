"""How far a learner is: what is written, what passes, and what comes next."""

from rich.cells import set_cell_size
from rich.table import Table

from milestones.check import run_tests, verdict
from milestones.language import t
from milestones.mine import Mine
from milestones.say import console, say
from milestones.tasks import Exercise

COLOURS = {"passing": "green", "failing": "red", "missing": "red", "does not parse": "red", "not written": "yellow"}


def started_exercises(mine: Mine) -> list[Exercise]:
    """The exercises of all milestones that were started, in the order of the course."""
    return [e for m in mine.course.milestones if m.id in mine.state.started for e in m.exercises]


def newest_started(mine: Mine) -> str:
    """The last that was started, in the order of the course; m1 if nothing was."""
    return next((m.id for m in reversed(mine.course.milestones) if m.id in mine.state.started), "m1")


def print_place(mine: Mine) -> None:
    """Print where the learner is, and the next step. Raises ValueError where there is no course."""
    state, milestones = mine.state, mine.course.milestones
    if not milestones:
        raise ValueError(t("{folder} has no milestones", folder=mine.course.root))
    for milestone in milestones:
        done = sum(map(mine.written, milestone.exercises)) if milestone.id in state.started else 0
        bar = "■" * done + "□" * (len(milestone.exercises) - done)
        note = "" if milestone.id in state.started else t("not started")
        say(f"[bold]{milestone.id}[/] {set_cell_size(t(milestone.title), 35)} {bar}  {note}")
    console.print()
    exercises = started_exercises(mine)
    failed = [e.id for e in exercises if e.id in state.failed and mine.written(e)]
    for id in failed:
        say("[red]{id}[/] is written, and failed when its tests last ran: python -m milestones test {id}", id=id)
    if todo := next((e for e in exercises if not mine.written(e)), None):
        _print_task(mine, todo)
        return
    if state.started and not failed:
        id = newest_started(mine)
        said = "{id} has passed. After a change:" if id in state.passed else "Does it hold?"
        say("All that you started is written. {said}  python -m milestones test {id}", said=t(said, id=id), id=id)
    _print_ahead(mine)


def _print_task(mine: Mine, todo: Exercise) -> None:
    lines = t("{n} line" if todo.lines == 1 else "{n} lines", n=todo.lines)
    say("Next: [bold]{id}[/] {title}, about {lines}", id=todo.id, title=t(todo.title), lines=lines)
    if gone := mine.missing(todo) or mine.broken(todo):
        say(f"  [red]{gone}[/]")
    for symbol in todo.symbols:
        say("  write   {name}  {place}", name=symbol.name, place=mine.line(symbol))
    say("  task    python -m milestones task {id}", id=todo.id)
    say("  test    python -m milestones test {id}", id=todo.id)
    say("  stuck   python -m milestones hint {id}", id=todo.id)


def _print_ahead(mine: Mine) -> None:
    """The milestone to start, and the component that belongs to the newest one."""
    state, milestones = mine.state, mine.course.milestones
    newest = max((i for i, m in enumerate(milestones) if m.id in state.started), default=-1)
    if ahead := next((m for m in (*milestones[newest + 1 :], *milestones) if m.id not in state.started), None):
        say("Next: python -m milestones start {id}  ({summary})", id=ahead.id, summary=t(ahead.summary))
    own = next((b for b in mine.course.builders if b.milestone == newest_started(mine)), None)
    if own and state.started and not (mine.folder / own.path).is_file():
        said = "Beside it, if you like: python -m milestones build {id}  ({title}, {minutes} minutes)"
        say(said, id=own.milestone, title=t(own.title), minutes=own.minutes)


def print_status(mine: Mine, run: bool) -> None:
    """Print what has become of each exercise that was started; `run` its tests, or look only at what is written."""
    started, hints = started_exercises(mine), mine.state.hints
    nodes = list(dict.fromkeys(test for e in started if mine.written(e) for test in e.tests))
    outcomes = run_tests(mine, ["-q", *nodes], quiet=True)[1] if nodes and run else {}
    for milestone in mine.course.milestones:
        if milestone.id not in mine.state.started:
            say("{id} {title}: not started", id=milestone.id, title=t(milestone.title))
            continue
        table = Table(title=f"{milestone.id} {t(milestone.title)}", title_justify="left", expand=False)
        for column in ("exercise", "", "difficulty", "hints", "state"):
            table.add_column(t(column))
        for exercise in milestone.exercises:
            state = verdict(mine, exercise, outcomes)
            state = "written" if not run and state == "not run" else state
            used = str(hints.get(exercise.id, "")) or "-"
            colour = COLOURS.get(state, "dim")
            shown = f"[{colour}]{t(state)}[/]"
            table.add_row(exercise.id, t(exercise.title), "●" * exercise.difficulty, used, shown)
        console.print(table)
    for gone in dict.fromkeys(filter(None, (mine.missing(e) or mine.broken(e) for e in started))):
        say(f"[red]{gone}[/]")
