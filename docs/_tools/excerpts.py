"""Writes into the book what it takes from the code: `python docs/_tools/excerpts.py`, or `make docs`, which builds the book too.

A page says what it wants in a comment, and the lines down to the next `<!-- end -->` are written anew each time:

    <!-- code folovllm.config:PRESETS -->                      the source of a class, function, method or constant
    <!-- signature folovllm.engine.scheduler:Scheduler.add --> the same up to its docstring: what an exercise may show
    <!-- flags folovllm.config:EngineConfig -->                a table of the fields, with their flags and defaults
    <!-- symbols folovllm.llm:LLM.generate ... -->             a table: what they do, file, milestone, exercise
    <!-- milestones -->                                        tables of the milestones and of the electives, from their manifests

So a page reads the same on a code host as in the built book. A Chinese page has what its English one has, with the words of tables as
`tables.zh.toml` translates them. A test compares the pages with the code.
"""

from __future__ import annotations

import ast
import importlib
import re
import sys
import textwrap
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]  # the code beside these pages, whichever is installed

from editions import filled_from, is_chinese  # noqa: E402
from reading_order import ORDER  # noqa: E402

from milestones.manifest import Course  # noqa: E402

COURSE = Course(ROOT)
OPENING = re.compile(r"^<!-- (code|signature|flags|symbols|milestones|computed)\b *(.*?) -->$", re.MULTILINE)
END = "<!-- end -->"
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def main() -> None:
    """Write the pages, and name those that were not as the code is."""
    for page in pages():
        text, source = page.read_text("utf-8"), page.with_name(page.name.replace(".zh.md", ".md"))
        try:
            filled = fill_in(text) if page == source else filled_from(source.read_text("utf-8"), text)
        except ValueError as error:
            sys.exit(f"error: {page.relative_to(ROOT)}: {error}")
        if filled != text:
            page.write_text(filled, "utf-8")
            print(f"{page.relative_to(ROOT)}: written")


def pages() -> list[Path]:
    """The first page of the repository and the book in both editions; what is Chinese stands behind its source."""
    found = [*ROOT.glob("README*.md"), *(ROOT / "docs").rglob("*.md")]
    return sorted(found, key=lambda page: (is_chinese(page), page))


def fill_in(page: str) -> str:
    """A page with all that stands between a marker and its end written anew. ValueError for what is not there."""
    *parts, rest = re.split(rf"^{END}$", page, flags=re.MULTILINE)
    if unclosed := OPENING.search(rest):
        raise ValueError(f"{unclosed[0]} has no {END}")
    return "".join([*(f"{_fill_in_part(part)}\n\n{END}" for part in parts), rest])


def _fill_in_part(part: str) -> str:
    """The text before an `END`, with exactly one opening, and behind it what it asks for."""
    openings = list(OPENING.finditer(part))
    if not openings:
        raise ValueError(
            f"one {END} closes nothing: what begins is code, signature, flags, symbols, milestones or computed"
        )
    if len(openings) > 1:
        raise ValueError(f"{openings[0][0]} has no {END}")
    word, target = openings[0].groups()
    return f"{part[: openings[0].end()]}\n\n{_replacement(word, target)}"


def _replacement(word: str, target: str) -> str:
    match word:
        case "flags":
            return flag_table(target)
        case "symbols":
            return symbol_table(target.split())
        case "milestones":
            return milestone_table()
        case "computed":
            return computed(*target.split())
    module, _, name = target.partition(":")
    place = source_file(module).relative_to(ROOT).as_posix()
    return f"```python\n# {place}: {name}\n{excerpt(target, signature=word == 'signature')}\n```"


def source_file(module: str) -> Path:
    """`folovllm.config` -> its file."""
    path = ROOT.joinpath(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    if not file.is_file():
        raise ValueError(f"there is no module {module}")
    return file


def excerpt(target: str, signature: bool = False) -> str:
    """The source of `module:qualified.name`, dedented; with `signature`, `...` stands for what follows the first paragraph
    of the docstring: the whole of it is where the body goes.
    """
    node = definition(target)
    first, last = _first_line(node), node.end_lineno  # type: ignore[attr-defined]
    lines = source_file(target.partition(":")[0]).read_text("utf-8").splitlines()[first - 1 : last]
    if signature and isinstance(node, Definition):
        head, indent = lines[: node.body[0].lineno - first], " " * (node.col_offset + 4)
        docstring = lines[len(head) : (node.body[0].end_lineno or 0) - first + 1] if ast.get_docstring(node) else []
        if "" in docstring:
            docstring = [*docstring[: docstring.index("") - 1], docstring[docstring.index("") - 1] + '"""']
        lines = [*head, *docstring, indent + "..."]
    return textwrap.dedent("\n".join(lines))


def definition(target: str) -> ast.AST:
    """The statement that defines `module:qualified.name`. ValueError if there is none."""
    module, _, name = target.partition(":")
    node: ast.AST = _tree(source_file(module))
    for part in name.split("."):
        node = _member(node, part, target)
    return node


@cache
def _tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text("utf-8"))


def _member(parent: ast.AST, name: str, target: str) -> ast.AST:
    """The statement in the body of `parent` that defines `name`."""
    for node in getattr(parent, "body", []):
        if isinstance(node, Definition) and node.name == name:
            return node
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(item, ast.Name) and item.id == name for item in targets):
            return node  # type: ignore[no-any-return]
    raise ValueError(f"there is no {target}")


def _first_line(node: ast.AST) -> int:
    return min(part.lineno for part in (node, *getattr(node, "decorator_list", [])))  # type: ignore[attr-defined]


def flag_table(target: str) -> str:
    """Flags, defaults and meanings of a dataclass, from the same source as `--help`."""
    from folovllm.apps.cli.flags import default_of, described_fields, flag_name

    module, _, name = target.partition(":")
    rows = ["| flag | default | |", "|---|---|---|"]
    for field, sentence in described_fields(getattr(importlib.import_module(module), name)):
        default = default_of(field)
        shown = "" if default is None else f"`{default}`"
        rows.append(f"| `{flag_name(field)}` | {shown} | {sentence.replace('|', chr(92) + '|')} |")
    return "\n".join(rows)


def milestone_table() -> str:
    """One row for each milestone; its title leads to the chapter, if there is one."""
    rows = ["| | milestone | |", "|---|---|---|"]
    electives = ["", "| | elective | |", "|---|---|---|"]
    for m in COURSE.milestones:
        title = f"[{m.title}]({Path(m.chapter).name})" if m.chapter else m.title
        (electives if m.is_elective else rows).append(f"| **{m.id.upper()}** | {title} | {m.summary} |")
    return "\n".join(rows + electives * (len(electives) > 3))


def computed(function: str, *arguments: str) -> str:
    """What a function of a tool beside this one returns, for example "shapes:step_table 0"."""
    module, _, name = function.partition(":")
    if not Path(__file__).with_name(f"{module}.py").is_file():
        raise ValueError(f"there is no {module}.py beside excerpts.py")
    if not callable(found := getattr(importlib.import_module(module), name, None)):
        raise ValueError(f"there is no {name} in {module}.py")
    return str(found(*map(int, arguments)))


def symbol_table(targets: list[str]) -> str:
    """One row for each function or class: its first sentence, its file, the milestone that adds it, the exercise that it is."""
    exercises = {str(symbol): exercise.id for exercise in COURSE.exercises for symbol in exercise.symbols}
    milestones = {file: id for id, rows in ORDER.items() for file, *_ in rows}
    rows = ["| | what it does | file | milestone | exercise |", "|---|---|---|---|---|"]
    for target in targets:
        module, _, name = target.partition(":")
        file = source_file(module).relative_to(ROOT / "folovllm").as_posix()
        exercise = exercises.get(target, "")
        if not (id := exercise.partition(".")[0] or milestones.get(file, "")):
            raise ValueError(f"{file} of {target} is not in the reading order (docs/_tools/reading_order.py)")
        built = f"[{id.upper()}]({Path(COURSE.milestone(id).chapter).name})"
        rows.append(f"| `{name}` | {first_sentence(target)} | `{file}` | {built} | {exercise} |")
    return "\n".join(rows)


def first_sentence(target: str) -> str:
    """Of a docstring, fit for a table."""
    paragraph = (ast.get_docstring(definition(target)) or "").split("\n\n")[0].replace("\n", " ")  # type: ignore[arg-type]
    return re.split(r"(?<=\.) (?=[A-Z`])", paragraph)[0].replace("|", "\\|")


if __name__ == "__main__":
    main()
