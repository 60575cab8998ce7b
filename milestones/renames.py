"""Reads the history of the reference's names (`renames.toml`, format: README.md), and renames them in what a learner wrote.

A name is changed where Python reads it. In strings and comments only full paths are changed. Every other character stays as it
was written.
"""

import ast
import contextlib
import io
import itertools
import re
import tokenize
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from milestones.splice import FunctionNode, functions, module_names
from milestones.tasks import PACKAGE

MAGIC, HIDDEN = re.compile(r"^([^\S\n]*)([%!].*)", re.M), "pass  #magic "  # IPython's own lines in a cell
BETWEEN = "\n#cell\n"  # two cells of a notebook
NO_WORDS = (tokenize.COMMENT, tokenize.NL, tokenize.INDENT, tokenize.DEDENT)


@dataclass(frozen=True, slots=True)
class Change:
    """An old and a new place: of a module, `module:Name`, `module:Class.member` or `module:function(parameter)`."""

    old: str
    new: str
    only: tuple[str, ...] = ()  # exercises or milestones whose bodies use the name; all, if none is named
    on: tuple[str, ...] = ()  # of a member: names that may stand before its dot; `self` also where a class defines it
    contract: str = ""  # what else a body has to do since then; a body that was written before is cut out

    @property
    def is_parameter(self) -> bool:
        return self.old.endswith(")")

    @property
    def is_member(self) -> bool:
        return "." in self.old.partition(":")[2]

    @property
    def parts(self) -> list[str]:
        """The names in `old`: the last is changed, that before it is its owner's."""
        return re.split(r"[.:(]", self.old.rstrip(")"))

    @property
    def becomes(self) -> str:
        """The last name in `new`."""
        return re.split(r"[.:(]", self.new.rstrip(")"))[-1]

    def moved(self, path: str) -> str:
        """Return where a path, written with dots only, is after the change."""
        old, new = dotted(self.old), dotted(self.new)
        within = not self.is_parameter and (path == old or path.startswith(f"{old}."))
        return new + path[len(old) :] if within else path

    def concerns(self, ids: Iterable[str]) -> bool:
        """Whether a body, or a file, of one of these exercises may use the old name."""
        return not self.only or any(f"{id}.".startswith(f"{own}.") for id in ids for own in self.only)


def dotted(place: str) -> str:
    return place.replace(":", ".")


def read_changes(file: Path) -> tuple[Change, ...]:
    """Return the changes in a file, none if there is no file."""
    rows = tomllib.loads(file.read_text("utf-8"))["changes"] if file.is_file() else []
    return tuple(Change(**{k: tuple(v) if isinstance(v, list) else v for k, v in row.items()}) for row in rows)


def follow(changes: Iterable[Change], path: str) -> tuple[str, list[str]]:
    """Return where a path is after all changes, and the new contracts of its body."""
    contracts = []
    for change in changes:
        if change.contract and path == dotted(change.old):
            contracts.append(change.contract)
        path = change.moved(path)
    return path, contracts


def renamed(text: str, changes: Iterable[Change], ids: Iterable[str], module: str = "") -> str:
    """Return a module's source, or a cell's, after the changes that concern these exercises. Raises SyntaxError if it is no Python."""
    ids = [*ids]
    for change in changes:
        if change.concerns(ids) and change.parts[-1] in text and change.old != change.new:
            text = _rename_words(text, change, module)
            if not change.is_parameter and not change.is_member:
                text = _rename_imports(text, change)
                text = re.sub(rf"(?<![\w.]){re.escape(dotted(change.old))}(?!\w)", dotted(change.new), text)
        module = change.moved(module)
    return text


def renamed_cells(cells: Sequence[str], changes: Iterable[Change], ids: Iterable[str]) -> list[str]:
    """Return a notebook's cells after the changes. A cell that is not Python stays as it is."""
    python = dict[int, str]()
    for number, cell in enumerate(cells):
        with contextlib.suppress(SyntaxError):
            ast.parse(plain := MAGIC.sub(rf"\1{HIDDEN}\2", cell))
            python[number] = plain
    fresh = renamed(BETWEEN.join(python.values()), changes, ids).replace(HIDDEN, "").split(BETWEEN)
    return [*(dict(enumerate(cells)) | dict(zip(python, fresh, strict=False))).values()]


@dataclass(frozen=True, slots=True)
class Word:
    """A name in a text's code, outside of imports."""

    start: int
    line: int  # counted from 1
    name: str
    kind: str  # "member" behind a dot, "keyword" of a call, "def" behind def or class, else "name"
    near: str  # of a member: the name before the dot; of a keyword: that of the function called
    root: str  # of a member: the first of all names before it


@lru_cache(maxsize=8)
def words(text: str) -> tuple[Word, ...]:
    """Return the names in a text's code, outside of imports, in their order."""
    return tuple(_words(text))


def _words(text: str) -> Iterator[Word]:
    starts = [0, *itertools.accumulate(len(line) + 1 for line in text.split("\n"))]
    opened: list[tuple[str, bool]] = []  # of each open bracket: the name before it, and whether that is being defined
    tokens = [t for t in tokenize.generate_tokens(io.StringIO(text).readline) if t.type not in NO_WORDS]
    before, last, root, is_import = ["", "\n"], "", "", False
    for token, following in itertools.pairwise([*tokens, *tokens[-1:]]):
        string, line = token.string, token.start[0]
        start = starts[line - 1] + token.start[1]
        if is_import or (string in ("from", "import") and before[-1].strip() in ("", ":", ";")):
            is_import = token.type != tokenize.NEWLINE
        elif token.type == tokenize.STRING and "f" in string.partition(string[-1])[0].lower():
            # Python 3.11 has one token for an f-string.
            for code in re.finditer(r"(?<!\{)(?:\{\{)*\{([^{}]+)", string):
                with contextlib.suppress(tokenize.TokenError):
                    yield from (replace(w, start=start + code.start(1) + w.start, line=line) for w in _words(code[1]))
        elif token.type == tokenize.NAME:
            is_given = following.string == "=" and before[-1] in ("(", ",") and opened and not opened[-1][1]
            kind = "member" if before[-1] == "." else "def" if before[-1] in ("def", "class") else "name"
            root = root if kind == "member" else string
            yield Word(start, line, string, "keyword" if is_given else kind, opened[-1][0] if is_given else last, root)
            last = string
        elif string in ("(", "[", "{"):
            opened.append((last, before[0] == "def"))
            last = ""
        elif string in (")", "]", "}"):
            last, root = opened.pop()[0], ""
        elif string != ".":
            last = root = ""
        before = [before[-1], string]


def _rename_words(text: str, change: Change, module: str) -> str:
    """Return a text after one change, except its imports and full paths."""
    old, new, within = change.parts[-1], change.becomes, functions(text)
    found = [word for word in words(text) if word.name in (old, new)]
    if all(word.name == new for word in found):
        return text
    known = bindings(ast.parse(text), module)
    edits, taken, where = dict[int, str](), dict[int, FunctionNode](), list[FunctionNode]()
    for word in found:
        around = ((n, name) for name, n in within if n.lineno <= word.line <= (n.end_lineno or 0))
        node, name = next(around, (None, ""))
        own = locals_of(node) if node else set()
        if word.name == new and node and word.kind == "name" and new in own:
            taken[word.start] = node
        elif word.name == old and _means(word, change, known, node, "." in name, old in own):
            edits[word.start] = new
            where += [node] if node else []
    edits |= {start: f"{new}_" for start, node in taken.items() if node in where}  # a local of the learner's
    for start in sorted(edits, reverse=True):
        length = len(new if start in taken else old)
        text = text[:start] + edits[start] + text[start + length :]
    return text


def _means(
    word: Word, change: Change, known: Mapping[str, str], node: FunctionNode | None, is_method: bool, is_local: bool
) -> bool:
    """Whether `word`, which has the old name, means what the change renames. `node` is the function around it; `is_local`: bound there."""
    owner, home = change.parts[-2], dotted(change.old).rpartition(".")[0]
    if change.is_parameter:
        of_it = word.near == owner if word.kind == "keyword" else node is not None and node.name == owner
        return of_it and (word.kind == "keyword" or (word.kind == "name" and is_local))
    if not change.is_member:
        if word.kind == "member":  # of a module
            return word.near == word.root and known.get(word.root) == home
        return word.kind != "keyword" and not is_local and known.get(word.name) == f"{home}.{word.name}"
    if word.kind == "keyword":
        return word.near in (owner, "replace")
    if word.kind == "def":
        return is_method and node is not None and node.lineno == word.line and (not change.on or "self" in change.on)
    is_ours = known.get(word.root, PACKAGE).startswith(PACKAGE)
    return word.kind == "member" and is_ours and (not change.on or word.near in change.on)


def _rename_imports(text: str, change: Change) -> str:
    """Return a text whose `from a import b` name the new modules and names, with one statement for each module."""
    before = text
    for node in ast.walk(ast.parse(before)):
        if not isinstance(node, ast.ImportFrom) or node.level or not node.module:
            continue
        homes: dict[str, list[ast.alias]] = {}
        for alias in node.names:
            home, _, name = change.moved(f"{node.module}.{alias.name}").rpartition(".")
            homes.setdefault(home, []).append(ast.alias(name, alias.asname))
        if {*homes} != {node.module} or [a.name for a in homes[node.module]] != [a.name for a in node.names]:
            said, indent = ast.get_source_segment(before, node) or "", " " * node.col_offset
            now = f"\n{indent}".join(ast.unparse(ast.ImportFrom(home, names, 0)) for home, names in homes.items())
            text = re.sub(rf"(?m)^([^#\n'\"]*?){re.escape(said)}(?=\s*(?:[;#]|$))", rf"\g<1>{now}", text)
    return text


def locals_of(node: FunctionNode) -> set[str]:
    """Return the names that a function binds: parameters, assigned variables, inner functions and classes."""
    inside = [n for part in (node.args, *node.body) for n in ast.walk(part)]
    elsewhere = {id(n) for c in inside if isinstance(c, ast.comprehension) for n in ast.walk(c.target)}
    found = {n.arg for n in inside if isinstance(n, ast.arg)}
    found |= {
        n.id for n in inside if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store) and id(n) not in elsewhere
    }
    found |= {n.name for n in inside if isinstance(n, FunctionNode | ast.ClassDef)}
    return found - {name for n in inside if isinstance(n, ast.Global) for name in n.names}


def bindings(tree: ast.Module, module: str) -> dict[str, str]:
    """Return the dotted path of each name that a text imports anywhere, or defines at its top level."""
    found = {name: f"{module}.{name}" for name in module_names(tree.body)} if module else {}
    for node in (node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)):
        prefix = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
        for alias in node.names:
            first = alias.name.partition(".")[0]
            found[alias.asname or first] = prefix + alias.name if prefix or alias.asname else first
    return found
