"""`python -m milestones mini`, `path` and `build mini`: an engine of one's own, from an empty folder."""

from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.markdown import Markdown
from rich.table import Table
from rich.text import Text

from milestones.language import t, translated
from milestones.mini.course import HISTORY, ROOT, Own, Stage, stages
from milestones.say import console, print_hints, say, say_what_is_left

app = typer.Typer()
mini = typer.Typer(help="An engine of your own, from an empty folder: seven stages, and the harness that plays it.")
app.add_typer(mini, name="mini")

Number = Annotated[int | None, typer.Argument(metavar="[STAGE]", help="A stage, 0 to 6; the next if left out.")]
Threads = Annotated[
    int, typer.Option(min=1, help="Threads of torch. With more than one, many small tensors take longer.")
]
Seconds = Annotated[bool, typer.Option("--time", help="Also tokens a second, beside FoloVLLM and transformers.")]


@app.command()
def path(chosen: Annotated[Literal["mini", "engine"], typer.Argument(help="mini or engine.")]) -> None:
    """Choose the path whose next step the course shows: an engine of your own (mini), or exercises in the real one (engine).

    The other path stays as it is.
    """
    own = Own.here()
    if chosen == "mini":
        build()
    notes = own.notes
    notes.path = chosen
    if own.is_begun:
        own.save(notes)
    say("The next step is shown by: python -m milestones")


def build() -> None:
    """Make mine/mini/, and say what to do in it."""
    own = Own.here()
    said = "new, yours to write" if own.begin() else "there already, left as it is"
    say("{folder}: {said}", folder=own.folder, said=t(said))
    print_place()


def print_place() -> None:
    """Print how far the engine is, and the one next step."""
    passed = Own.here().notes.passed
    for stage in stages():
        of = {"mark": "■" if stage.number <= passed else "□", "number": stage.number, "title": t(stage.title)}
        of |= {"files": stage.writes, "hours": t("{n} hours", n=stage.hours)}
        say("{mark} [bold]{number}[/] {title}  ({files}, {hours})", **of)
    console.print()
    if passed == len(stages()) - 1:
        say("All stages pass: the engine is yours. What is it worth?  python -m milestones mini score --time")
        _print_surgery(stages()[-1])
        return
    _print_task(stages()[passed + 1])


def _print_task(stage: Stage) -> None:
    chapter = translated(ROOT / stage.read).relative_to(ROOT)
    of = {"number": stage.number, "title": t(stage.title), "lines": stage.lines}
    say("Next: stage [bold]{number}[/], {title}, about {lines} lines", **of)
    say("  read    {chapter}; the task: python -m milestones mini task", chapter=chapter)
    say("  write   {files}  {folder}", files=stage.writes, folder=Own.here().folder)
    say("  test    python -m milestones mini test")
    say("  stuck   python -m milestones mini hint")


def _print_surgery(stage: Stage) -> None:
    if stage.surgery:
        ids = ", ".join(stage.surgery)
        say("Worth doing in the real engine now (python -m milestones path engine): {ids}", ids=ids)


@mini.callback(invoke_without_command=True)
def where(context: typer.Context) -> None:
    """An engine of your own, from an empty folder: seven stages, and the harness that plays it.

    Without a command: how far it is, and the next step.
    """
    if not context.invoked_subcommand:
        Own.here().stage(None)
        print_place()


@mini.command()
def task(number: Number = None) -> None:
    """What a stage asks."""
    console.print(Markdown(Own.here().stage(number).task))


@mini.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def test(context: typer.Context, number: Number = None) -> None:
    """Run the tests of a stage on your engine, and those of all stages before. They stop at the first failure.

    Further arguments go to pytest.
    """
    own = Own.here()
    stage = own.stage(number)
    status = own.test(stage, context.args)
    if status == 0 and not context.args:
        say("[green]Stage {number} passes, and all before it.[/] Next: python -m milestones mini", number=stage.number)
        files = ", ".join(f"milestones/mini/reference/{name}" for name in _reference(stage))
        say("Compare with {files}. What is yours worth?  python -m milestones mini score", files=files)
        _print_surgery(stage)
    raise typer.Exit(status)


def _reference(stage: Stage) -> list[str]:
    return ["serial.py"] if stage.number == 0 else stage.writes.split(", ")


@mini.command()
def hint(number: Number = None, all: Annotated[bool, typer.Option("--all", help="All three.")] = False) -> None:
    """One more hint each time: a nudge, the approach, nearly the code."""
    own = Own.here()
    stage, notes = own.stage(number), own.notes
    key, used = str(stage.number), notes.hints.get(str(stage.number), 0)
    shown = print_hints(stage.hints, used, all)
    notes.hints[key] = max(shown, used)
    own.save(notes)
    answer = t("one way is in {file}", file=f"milestones/mini/reference/{_reference(stage)[0]}")
    say_what_is_left(stage.hints, shown, answer)


@mini.command()
def score(number: Number = None, seconds: Seconds = False, threads: Threads = 1) -> None:
    """Serve six requests, count what your engine does, and compare with the reference and with your earlier scores."""
    import torch

    from milestones.mini import alone
    from milestones.mini import score as scoring

    own = Own.here()
    stage = _played(own, number)
    result = alone.call(alone.Job("score", str(own.folder), stage.number, seconds, threads))
    if result.error or result.counts is None:
        _print_red(result.error)
        raise typer.Exit(1)
    torch.set_num_threads(threads)
    say("counted: {whose}", whose=t("the reference"))
    all_counts = {"yours": result.counts, "the reference": scoring.counts(stage.number)}
    speeds: dict[str, float | None] = {"yours": result.speed}
    if seconds:
        speeds |= scoring.speeds(stage.number, lambda whose: say("timed, three times: {whose}", whose=t(whose)))
    history = scoring.remember(own.folder / HISTORY, stage.number, result.counts, result.speed)
    table = Table("", *map(t, result.counts), t("tokens a second"), box=None)
    for whose in dict.fromkeys([*all_counts, *speeds]):
        numbers = all_counts.get(whose) or dict.fromkeys(result.counts)
        table.add_row(t(whose), *_cells([*numbers.values(), speeds.get(whose)]))
    for past in history[-6:-1]:
        when = t("stage {stage}, {day}", stage=past["stage"], day=past["day"])
        table.add_row(when, *_cells([*past["counts"].values(), past["tokens a second"]]), style="dim")
    console.print(table)


@mini.command()
def record(
    file: Annotated[Path, typer.Argument(help="The recording to write.")] = Path("mini.jsonl"),
    stage: Annotated[int | None, typer.Option(help="A stage, 0 to 6; the last that passed if left out.")] = None,
) -> None:
    """Record your engine while it serves six requests, up to the step that is wrong if one is. The inspector plays it."""
    from milestones.mini import alone

    own = Own.here()
    result = alone.call(alone.Job("record", str(own.folder), _played(own, stage).number))
    if result.error:
        left = "{error}: the recording ends there" if result.steps else "no step to record: {error}"
        _print_red(t(left, error=result.error))
    if not result.steps:
        raise typer.Exit(1)
    file.write_text(result.recording, encoding="utf-8")
    say("{file}: {n} steps. Look at it: folovllm inspect {file}", file=file, n=result.steps)


def _cells(numbers: list[int | float | None]) -> list[str]:
    return ["-" if number is None else f"{number:,.0f}" for number in numbers]


def _print_red(said: str) -> None:
    """Print a sentence as it is: what it has in brackets is no markup."""
    console.print(Text(said, style="red"), soft_wrap=True)


def _played(own: Own, number: int | None) -> Stage:
    """The stage in which an engine is played: the last that passed, unless one is named."""
    return own.stage(max(own.notes.passed, 0) if number is None else number)
