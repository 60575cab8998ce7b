"""`python -m milestones build` and `score`: begin a component of your own, and see what it is worth."""

import os
from typing import Annotated

import typer
from rich.markdown import Markdown
from rich.table import Table

from milestones.builders import begin, scores
from milestones.language import t
from milestones.manifest import Course
from milestones.mine import Mine
from milestones.mini import cli as mini
from milestones.say import console, say

app = typer.Typer()


@app.command()
def build(
    id: Annotated[
        str,
        typer.Argument(
            metavar="[ID]", help="A milestone, say m3, or mini: a whole engine; all builders are listed if left out."
        ),
    ] = "",
) -> None:
    """Begin a whole component of your own, beside the exercises: an empty file in mine/folovllm/builders/.

    What you wrote there is never touched. No exercise needs it.
    """
    if id == "mini":
        return mini.build()
    mine = Mine.of(Course.here())
    if not id:
        table = Table("", *map(t, ("builder", "minutes", "your file")), box=None)
        for builder in mine.course.builders:
            begun = (mine.folder / builder.path).is_file()
            table.add_row(builder.id, t(builder.title), str(builder.minutes), str(builder.path) if begun else "-")
        console.print(table)
        return
    builder, state = mine.course.builder(id), mine.state
    file, is_new = begin(builder, mine.course, mine.folder)
    if is_new:
        mine.save(state)  # which names it is written in
        console.print(Markdown(builder.statement))
        console.print()
    said = t("new, yours to write") if is_new else t("there already, left as it is")
    console.print(f"{file}: {said}", soft_wrap=True)
    say("  test    python -m milestones test {id}", id=builder.id)
    say("  stuck   python -m milestones hint {id}", id=builder.id)
    say("  score   python -m milestones score {id}", id=builder.milestone)
    use = f"folovllm generate Hello --milestone {builder.milestone} --{builder.field} {builder.name} ..."
    say("  use it  FOLOVLLM_MINE=mine {command}", command=use)


@app.command()
def score(id: Annotated[str, typer.Argument(metavar="ID", help="A milestone, say m3.")]) -> None:
    """Compare your component with the engine's own and with the course's reference, once it passes its tests. Seconds are virtual."""
    os.environ.pop("FOLOVLLM_MINE", None)  # the engine around it is the reference's, so that scores can be compared
    mine = Mine.of(Course.here())
    builder = mine.course.builder(id)
    rows = scores(builder, mine)
    table = Table("", *map(t, rows[0][1]), box=None)
    for column in table.columns[1:]:
        column.justify = "right"
    for label, cells in rows:
        table.add_row(t(label), *cells.values(), style="bold" if label == "yours" else "")
    console.print(table)
    bronze, silver, gold = (f"{value:,}" for value in builder.medals)
    said = "{target} counts: bronze {bronze}, silver {silver}, gold {gold}"
    say(said, target=t(builder.target), bronze=bronze, silver=silver, gold=gold)
    if "yours" not in dict(rows):
        say("Yours is not begun: python -m milestones build {id}", id=builder.milestone)
