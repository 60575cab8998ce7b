"""Notebooks: built and executed from `notebooks/src/*.py`, and what their first cell says.

`python -m milestones.notebooks [NAME ...]` writes `notebooks/NAME.ipynb`, outputs and pictures included; `--check` executes
nothing and fails where a committed notebook's cells are not its source's.
"""

import argparse
import builtins
import logging
import os
import re
import sys
import tempfile
import time
import tomllib
from pathlib import Path
from typing import Any

from milestones.manifest import Course
from milestones.mine import Mine, write_variant
from milestones.mini.course import Own
from milestones.tasks import EXERCISE_ID

SECONDS, BYTES = 60, 500_000  # what one notebook may take
COLAB = """\
import sys
if "google.colab" in sys.modules:  # on Colab, install from the repository; anywhere else this cell does nothing
    repository = {address}
    !git clone -q {{repository}} /content/folovllm && pip install -q -e "/content/folovllm[dev]"
    %cd -q /content/folovllm"""
BADGE = "[![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/{repository}/blob/main/notebooks/{name}.ipynb)"


def running(id: str) -> None:
    """Print "running: yours (3 of 7)" or "running: the reference"; a notebook that lives in mine/ runs what is there.

    Call it before folovllm is imported: it may still set the switch.
    """
    course = Course.here()
    mine = Mine.of(course)
    if (own := Own.here()).notes.path == "mini":
        print(f"your path: mini, stage {own.stage(None).number} is next (python -m milestones)")
    if Path.cwd().is_relative_to(mine.folder):
        os.environ.setdefault("FOLOVLLM_MINE", str(mine.folder))
    if not os.environ.get("FOLOVLLM_MINE"):
        print("running: the reference")
        return
    mine = Mine(course, Path(os.environ["FOLOVLLM_MINE"]))
    exercises = course.milestone(id).exercises
    print(f"running: yours ({sum(map(mine.written, exercises))} of {len(exercises)})")
    if unwritten := [exercise.id for exercise in exercises if mine.blanks(exercise)]:
        print(f"not written yet: {', '.join(unwritten)}. A cell that needs one stops there and names it.")
        print("The same notebook in notebooks/ runs the reference: use it to predict and measure before you write.")
    if absent := [exercise.id for exercise in exercises if mine.absent(exercise)]:
        print(f"not in mine/, so the reference's: {', '.join(absent)}. `python -m milestones start {id}` brings them.")
    _name_the_unwritten(mine)


def _name_the_unwritten(mine: Mine) -> None:
    """In a notebook, the error of an unwritten exercise is one line, and so is that of a cell which needs the cell that stopped there.

    Every other error is shown as ever.
    """
    shell = getattr(builtins, "get_ipython", lambda: None)()
    if shell is None:
        return
    met: list[str] = []  # unwritten exercises, in the order in which cells stopped at them

    def unwritten(error: BaseException | None) -> str | None:
        blank = re.match(rf"(?:rank \d+ failed with )?(?:NotImplementedError: )?({EXERCISE_ID}): ", str(error))
        exercise = next((e for e in mine.course.exercises if blank and e.id == blank[1]), None)
        return exercise and f"{exercise} is not written yet: {mine.where(exercise)}"

    def show(shell: Any, kind: Any, error: BaseException, trace: Any, tb_offset: int | None = None) -> None:
        if sentence := unwritten(error):
            met.append(sentence)
            print(sentence, file=sys.stderr)
        elif isinstance(error, NameError) and met:
            print(
                f"an earlier cell stopped before it made `{error.name}`: {met[-1]}. Then run both cells again",
                file=sys.stderr,
            )
        else:
            shell.showtraceback((kind, error, trace), tb_offset=tb_offset)

    # NotImplementedError is a RuntimeError, and what a rank ended with is another.
    shell.set_custom_exc((RuntimeError, NameError), show)
    # The engine logs why a request ended; the sentence above says it.
    logging.getLogger("folovllm").addFilter(lambda record: not unwritten((record.exc_info or (None, None))[1]))


def address(root: Path) -> str:
    """Where the course is published, on GitHub: `[tool.folovllm.publish]` in pyproject.toml. Empty as long as nobody has said."""
    project = tomllib.loads((root / "pyproject.toml").read_text("utf-8")).get("tool", {}).get("folovllm", {})
    owner, name = (project.get("publish", {}).get(field, "") for field in ("owner", "repository"))
    return f"https://github.com/{owner}/{name}" if owner and name else ""


def add_colab(book: Any, name: str, address: str) -> None:
    """A cell before all code that installs on Colab, and a button that leads there once an address on GitHub is known."""
    import nbformat

    known = repr(address) if address else 'input("Address of the git repository: ")'
    first = next(i for i, cell in enumerate(book.cells) if cell.cell_type == "code")
    book.cells.insert(first, nbformat.v4.new_code_cell(COLAB.format(address=known)))  # type: ignore[no-untyped-call]
    if address:
        badge = BADGE.format(repository=address.removeprefix("https://github.com/"), name=name)
        book.cells[0].source += f"\n\n{badge}"


def parse(source: Path) -> Any:
    """A notebook without outputs. Cells are numbered, for random ids would make every build a difference."""
    import jupytext  # type: ignore[import-untyped]

    book = jupytext.read(source)
    add_colab(book, source.stem, address(Course.here(source.parent).root))
    book.metadata = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    for number, cell in enumerate(book.cells):
        cell.id, cell.metadata = f"cell-{number}", {}
    return book


def build(source: Path, target: Path, mine: Path) -> str:
    """Execute and write one notebook, over the files in `mine`; returns a line about it. Raises what a cell raised."""
    import nbformat
    from nbclient import NotebookClient

    book, began = parse(source), time.perf_counter()
    place = {"metadata": {"path": str(target.parent)}}
    client = NotebookClient(book, timeout=4 * SECONDS, record_timing=False, resources=place)
    client.execute(env={**os.environ, "FOLOVLLM_MINE": str(mine)})
    _call_it_the_reference(book)
    seconds = time.perf_counter() - began
    book.metadata.pop("language_info", None)  # the machine's Python version
    data = f"{nbformat.writes(book)}\n".encode()  # type: ignore[no-untyped-call]
    if len(data) > BYTES:
        raise ValueError(f"{target.name} has {len(data):,} bytes, more than {BYTES:,}: draw less, or at a lower dpi")
    target.write_bytes(data)
    slow = "" if seconds <= SECONDS else f", OVER {SECONDS} s"
    return f"{target.name}: {len(book.cells)} cells, {seconds:.0f} s{slow}, {len(data) // 1000} KB"


def _call_it_the_reference(book: Any) -> None:
    """Replace "running: yours" in the outputs: what is in `mine` here is the reference, and a reader has written nothing yet."""
    for output in (output for cell in book.cells for output in cell.get("outputs", ())):
        if output.output_type == "stream":
            output.text = re.sub(r"^running: yours \((\d+) of \1\)$", "running: the reference", output.text, flags=re.M)


def difference(source: Path, target: Path) -> str:
    """What keeps a committed notebook from being its source's; empty if nothing does."""
    import nbformat

    if not target.is_file():
        return "was never built"
    built = nbformat.read(target, as_version=4)  # type: ignore[no-untyped-call]
    for number, cell in enumerate(built.cells):
        if cell.cell_type == "code" and cell.source.strip() and cell.execution_count is None:
            return f"cell {number} was not executed"
        if any(output.output_type == "error" for output in cell.get("outputs", ())):
            return f"cell {number} failed"
    cells = [[(cell.cell_type, cell.source) for cell in book.cells] for book in (parse(source), built)]
    return "" if cells[0] == cells[1] else "its cells are not those of its source"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m milestones.notebooks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="say m1_offline_inference; all if left out")
    parser.add_argument("--check", action="store_true", help="compare cells, execute nothing")
    options = parser.parse_args(arguments)
    folder = Course.here().root / "notebooks"
    sources = sorted((folder / "src").glob("[mx][0-9]*.py"))
    sources = [source for source in sources if source.stem in options.names or not options.names]
    if options.check:
        found = {s.stem: said for s in sources if (said := difference(s, folder / f"{s.stem}.ipynb"))}
        for name, said in found.items():
            print(f"notebooks/{name}.ipynb: {said}; run `make notebooks`", file=sys.stderr)
        return bool(found)
    with tempfile.TemporaryDirectory() as mine:
        write_variant(Course.here(), Path(mine), whole=True)
        for source in sources:
            print(build(source, folder / f"{source.stem}.ipynb", Path(mine)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
