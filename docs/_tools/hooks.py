"""What the book takes from the code when it is built, so that no page can tell of code that is not there.

A line of its own in a page:

    {{ code folovllm.config:PRESETS }}                      the source of a class, function, method or constant
    {{ signature folovllm.engine.scheduler:Scheduler.add }} the same up to its docstring: what an exercise may show
    {{ flags folovllm.config:EngineConfig }}                a table of the fields, with their flags and defaults
    {{ milestones }}                                        the table of the milestones, from their manifests

Formulas, `$x$` and `$$x$$`, become MathML here: a browser draws them without a script. A name that does not exist fails the build; so does a line with another word in braces. The chapters stand in the
navigation in the order of the manifests that name them.
"""

from __future__ import annotations

import ast
import html
import importlib
import re
import textwrap
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def on_config(config: Any) -> Any:
    """Put the chapters that the manifests name after the first page. One that is missing fails a strict build."""
    config.nav[1:1] = [{m["title"]: Path(m["chapter"]).name} for m in manifests() if "chapter" in m]
    return config


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Fill in the lines in braces."""
    from mkdocs.exceptions import PluginError

    try:
        return fill_in(markdown)
    except ValueError as error:
        raise PluginError(f"{page.file.src_path}: {error}") from error


def on_page_content(content: str, **_: Any) -> str:
    """Formulas to MathML."""
    return re.sub(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', _formula, content, flags=re.DOTALL)


def _formula(match: re.Match[str]) -> str:
    from latex2mathml.converter import convert

    display = "block" if match[1] == "div" else "inline"
    return str(convert(html.unescape(match[2]), display=display))


def fill_in(markdown: str) -> str:
    """A page with its lines in braces replaced; ValueError for one that cannot be."""
    return re.sub(
        r"^\{\{ *(\w+) *(.*?) *\}\}$", lambda line: _replacement(*line.groups()), markdown, flags=re.MULTILINE
    )


def _replacement(word: str, target: str) -> str:
    match word:
        case "code" | "signature":
            path = source_file(target.partition(":")[0]).relative_to(ROOT)
            return f'```python title="{path.as_posix()}"\n{excerpt(target, signature=word == "signature")}\n```'
        case "flags":
            return flag_table(target)
        case "milestones":
            return milestone_table()
    raise ValueError(f"unknown word {word!r} in braces: code, signature, flags and milestones are known")


def manifests() -> list[dict[str, Any]]:
    """The milestones' manifests, in their order."""
    return [tomllib.loads(file.read_text("utf-8")) for file in sorted(ROOT.glob("milestones/m*/milestone.toml"))]


def source_file(module: str) -> Path:
    """`folovllm.config` -> its file."""
    path = ROOT.joinpath(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    if not file.is_file():
        raise ValueError(f"there is no module {module}")
    return file


def excerpt(target: str, signature: bool = False) -> str:
    """The source of `module:qualified.name`, dedented; with `signature`, `...` stands for what follows the docstring."""
    module, _, name = target.partition(":")
    source = source_file(module).read_text("utf-8")
    node: ast.AST = ast.parse(source)
    for part in name.split("."):
        node = _member(node, part, target)
    first, last = _first_line(node), node.end_lineno  # type: ignore[attr-defined]
    lines = source.splitlines()[first - 1 : last]
    if signature and isinstance(node, Definition):
        documented = ast.get_docstring(node) is not None
        kept = (node.body[0].end_lineno or 0) if documented else node.body[0].lineno - 1
        lines = [*lines[: kept - first + 1], " " * (node.col_offset + 4) + "..."]
    return textwrap.dedent("\n".join(lines))


def _member(parent: ast.AST, name: str, target: str) -> ast.AST:
    """The statement in the body of `parent` that defines `name`."""
    for node in getattr(parent, "body", []):
        if isinstance(node, Definition) and node.name == name:
            return node
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(item, ast.Name) and item.id == name for item in targets):
            return node  # type: ignore[no-any-return]
    raise ValueError(f"there is no {target}")


def _first_line(node: Any) -> int:
    return min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", []))])


def flag_table(target: str) -> str:
    """Flags, defaults and meanings of a dataclass, from the same source as `--help`."""
    from folovllm.flags import default_of, described_fields, flag_name

    module, _, name = target.partition(":")
    rows = ["| flag | default | |", "|---|---|---|"]
    for field, sentence in described_fields(getattr(importlib.import_module(module), name)):
        default = default_of(field)
        shown = "" if default is None else f"`{default}`"
        rows.append(f"| `{flag_name(field)}` | {shown} | {sentence.replace('|', chr(92) + '|')} |")
    return "\n".join(rows)


def milestone_table() -> str:
    """One row for each milestone that has a manifest; its title leads to the chapter, if there is one."""
    rows = ["| | milestone | |", "|---|---|---|"]
    for m in manifests():
        title = f"[{m['title']}]({Path(m['chapter']).name})" if "chapter" in m else m["title"]
        rows.append(f"| **{m['id'].upper()}** | {title} | {m['summary']} |")
    return "\n".join(rows)
