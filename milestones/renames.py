"""What the reference's names were, oldest first, and what a learner wrote in those names, in those of today. Format: README.md.

A name is changed where Python reads it, never in a string or a comment (only a module's full path is, there too), and
every other character stays as it was written.
"""

import ast
import io
import re
import tokenize
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from milestones.splice import FunctionNode, module_names
from milestones.tasks import PACKAGE

Comprehension = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
Scope = ast.ClassDef | FunctionNode | ast.Lambda | Comprehension
MAGIC = re.compile(r"^([^\S\n]*)[%!].*", re.M)  # IPython's own lines in a cell


@dataclass(frozen=True, slots=True)
class Change:
    """One place and the one that took over: a module, `module:Name`, `module:Class.member` or `module:function(parameter)`."""

    old: str
    new: str
    only: tuple[str, ...] = ()  # exercises or milestones whose bodies say it; all, if none is named
    on: tuple[str, ...] = ()  # of a member: what stands before its dot; `self` also where a class defines it
    contract: str = ""  # what else a body has to do since; one that was written before is cut out

    def __post_init__(self) -> None:
        if len({(":" in place, "(" in place) for place in (self.old, self.new)}) > 1:
            raise ValueError(f"{self.old} cannot become {self.new}: a module becomes a module, a parameter a parameter")
        if self.old == self.new and not self.contract:
            raise ValueError(f"{self.old} is what it was")

    @property
    def is_module(self) -> bool:
        return ":" not in self.old

    @property
    def is_parameter(self) -> bool:
        return self.old.endswith(")")

    @property
    def owner(self) -> str:
        """Whose member or parameter it is: the last name before."""
        return re.split(r"[.:(]", self.old.rstrip(")"))[-2]

    @property
    def names(self) -> tuple[str, str]:
        """The last name, old and new."""
        old, new = (re.split(r"[.:(]", place.rstrip(")"))[-1] for place in (self.old, self.new))
        return old, new

    def moved(self, path: str) -> str:
        """Where a path, all dots, is after the change."""
        old, new = dotted(self.old), dotted(self.new)
        within = not self.is_parameter and (path == old or path.startswith(f"{old}."))
        return new + path[len(old) :] if within else path

    def concerns(self, ids: Iterable[str]) -> bool:
        """Whether it is said in a body, or a file, of one of these exercises."""
        return not self.only or any(f"{id}.".startswith(f"{own}.") for id in ids for own in self.only)


def dotted(place: str) -> str:
    return place.replace(":", ".")


def read_changes(file: Path) -> tuple[Change, ...]:
    """The history in a file, empty where there is none. Raises ValueError that names the file."""
    if not file.is_file():
        return ()
    try:
        rows = tomllib.loads(file.read_text(encoding="utf-8"))["changes"]
        lists = [{k: tuple(v) if isinstance(v, list) else v for k, v in row.items()} for row in rows]
        return tuple(Change(**row) for row in lists)
    except (TypeError, KeyError, ValueError) as error:
        raise ValueError(f"{file}: {error}") from error


def follow(changes: Iterable[Change], path: str) -> tuple[str, list[str]]:
    """Where a path is after all changes, and what is new about its contract."""
    contracts = []
    for change in changes:
        if change.contract and path == dotted(change.old):
            contracts.append(change.contract)
        path = change.moved(path)
    return path, contracts


def renamed(
    text: str, changes: Sequence[Change], ids: Iterable[str], module: str = "", known: Mapping[str, str] | None = None
) -> str:
    """A source text of a module, or a cell, after the changes that concern these exercises. SyntaxError if it is none of Python's.

    `known` says what imports of earlier cells have bound.
    """
    ids, heard = [*ids], list[Change]()
    for change in changes:
        if change.concerns(ids) and (change.names[0] in text or any(change.names[0] == c.names[1] for c in heard)):
            heard.append(change)
    return Text(text, module, dict(known or {})).after(heard) if heard else text


@dataclass(slots=True)
class Word:
    """A name in a text; `near` is the one before its dot, or that of the function called or defined."""

    start: int
    name: str
    kind: str  # name, local, member or keyword; path: dots and all
    path: str = ""  # what it means, where imports or definitions tell
    near: "Word | None" = None
    scope: Scope | None = None  # of a local
    new: str = ""

    def follow(self, change: Change) -> None:
        """Take one change in."""
        old, new = change.names
        near = self.near.new if self.near else ""
        if self.path and (path := change.moved(self.path)) != self.path:
            if self.kind == "path":
                self.new = path
            elif self.new == self.path.rpartition(".")[2]:  # not what an import calls it
                self.new = path.rpartition(".")[2]
            self.path = path
        elif change.is_parameter:
            if self.new == old and near == change.owner and self.kind in ("keyword", "local"):
                self.new = new
        elif "." in change.old.partition(":")[2] and self.new == old and self._may_be(change, near):
            self.new = new

    def _may_be(self, change: Change, near: str) -> bool:
        """Whether a name that is a member's is that of this class's: of strangers' modules it is not."""
        if self.kind == "keyword":
            return near in (change.owner, change.new.rpartition(":")[2].partition(".")[0], "replace")
        ours = not self.path or self.path.startswith(f"{PACKAGE}.")
        return self.kind == "member" and ours and (not change.on or near in change.on)


SELF = Word(-1, "self", "local", new="self")  # before the dot of what a class defines


@dataclass
class Text:
    """One source text, its words and what they mean."""

    text: str
    module: str
    bound: dict[str, str]  # name: dotted path
    words: dict[int, Word] = field(default_factory=dict)  # by where they begin
    of_node: dict[int, Word] = field(default_factory=dict)

    @cached_property
    def python(self) -> str:
        """The text without what IPython alone understands, line for line."""
        try:
            ast.parse(self.text)
            return self.text
        except SyntaxError:
            return MAGIC.sub(r"\1pass", self.text)

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.python)

    @cached_property
    def lines(self) -> list[str]:
        return self.text.split("\n")

    @cached_property
    def starts(self) -> list[int]:
        starts = [0]
        for line in self.lines:
            starts.append(starts[-1] + len(line) + 1)
        return starts

    def at(self, line: int, column: int) -> int:
        """Where ast's line and column, which counts bytes, are in the text."""
        return self.starts[line - 1] + len(self.lines[line - 1].encode()[:column].decode(errors="ignore"))

    def after(self, changes: Sequence[Change]) -> str:
        """The text after the changes."""
        self.bound |= bindings(self.tree, self.module)
        Reader(self).visit(self.tree)
        for change in changes:
            for word in self.words.values():
                word.follow(change)
        self._on_full()
        edits = {w.start: (len(w.name), w.new) for w in self.words.values() if w.new != w.name}
        for start, end, new in (*self._in_words(changes), *self._imports(changes)):
            edits = {at: edit for at, edit in edits.items() if not start <= at < end} | {start: (end - start, new)}
        text = self.text
        for start in sorted(edits, reverse=True):
            length, new = edits[start]
            text = text[:start] + new + text[start + length :]
        return text

    def _on_full(self) -> None:
        """A local of the learner's that is called as something is from now on gets an underscore."""
        taken = {w.new for w in self.words.values() if w.kind in ("name", "local") and w.new != w.name}
        changed = {(id(w.scope), w.new) for w in self.words.values() if w.kind == "local" and w.new != w.name}
        for word in self.words.values():
            if word.kind == "local" and word.new == word.name and word.name in taken:
                globally = any(w.kind == "name" and w.new == word.name != w.name for w in self.words.values())
                if globally or (id(word.scope), word.name) in changed:
                    word.new += "_"

    def _in_words(self, changes: Sequence[Change]) -> Iterator[tuple[int, int, str]]:
        """Paths of modules in strings and comments."""
        paths = {change.old: follow(changes, change.old)[0] for change in changes if change.is_module}
        if not any(path in self.text for path in paths):
            return
        longest_first = "|".join(map(re.escape, sorted(paths, key=len, reverse=True)))
        pattern = re.compile(rf"(?<![\w.])(?:{longest_first})(?!\w)")
        for token in tokenize.generate_tokens(io.StringIO(self.python).readline):
            if token.type in (tokenize.STRING, tokenize.COMMENT, getattr(tokenize, "FSTRING_MIDDLE", -1)):
                start, end = (self.starts[line - 1] + column for line, column in (token.start, token.end))
                for match in pattern.finditer(self.text, start, end):
                    yield match.start(), match.end(), paths[match[0]]

    def _imports(self, changes: Sequence[Change]) -> Iterator[tuple[int, int, str]]:
        """`from a import b` where b is elsewhere now: a statement for each module that has something of it."""
        for node in ast.walk(self.tree):
            if not isinstance(node, ast.ImportFrom) or node.level or not (node.module or "").startswith(PACKAGE):
                continue
            paths = [follow(changes, f"{node.module}.{alias.name}")[0] for alias in node.names]
            homes = list(dict.fromkeys(path.rpartition(".")[0] for path in paths))
            start, end = (self.at(*place) for place in _span(node))
            if homes == [node.module]:
                continue  # what has another name is a word like others
            if len(homes) == 1 and (match := re.compile(r"from\s+([\w.]+)").match(self.text, start)):
                yield match.start(1), match.end(1), homes[0]
                continue
            names: dict[str, list[str]] = {home: [] for home in homes}
            for alias, path in zip(node.names, paths, strict=True):
                home, _, name = path.rpartition(".")
                names[home].append(f"{name} as {alias.asname}" if alias.asname else name)
            indent = self.lines[node.lineno - 1][: node.col_offset]
            yield start, end, f"\n{indent}".join(f"from {home} import {', '.join(names[home])}" for home in homes)


class Reader(ast.NodeVisitor):
    """Collects the words of a text."""

    def __init__(self, text: Text) -> None:
        self.text = text
        self.scopes: list[tuple[Scope, set[str], Word | None]] = []
        self.quoted: ast.JoinedStr | None = None

    def add(self, start: int, word: str, kind: str, path: str = "", near: Word | None = None) -> Word:
        found = Word(start, word, kind, path, near, new=word)
        if not self.text.text.startswith(word, start):  # in an f-string Python 3.11 does not know where
            start = found.start = self._search(word, kind)
        if start >= 0:
            self.text.words.setdefault(start, found)
        return found

    def _search(self, word: str, kind: str) -> int:
        if self.quoted is None:
            return -1
        begin, end = (self.text.at(*place) for place in _span(self.quoted))
        before = r"(?<=\.)" if kind == "member" else r"(?<=[{(,=\s])"
        found = re.compile(rf"{before}{word}\b").finditer(self.text.text, begin, end)
        return next((match.start() for match in found if match.start() not in self.text.words), -1)

    def meaning(self, node: ast.expr) -> str:
        """The dotted path of an expression, where its first name was imported or defined here."""
        if isinstance(node, ast.Attribute):
            return f"{path}.{node.attr}" if (path := self.meaning(node.value)) else ""
        return "" if not isinstance(node, ast.Name) or self.home(node.id) else self.text.bound.get(node.id, "")

    def home(self, name: str) -> tuple[Scope, set[str], Word | None] | None:
        """The function in which a name is a local one."""
        inside = [s for s in reversed(self.scopes) if not isinstance(s[0], ast.ClassDef)]
        return next((scope for scope in inside if name in scope[1]), None)

    def last(self, node: ast.expr) -> Word | None:
        """The word that an expression ends with; that of the function, where it is a call."""
        return self.text.of_node.get(id(node.func if isinstance(node, ast.Call) else node))

    def local(self, start: int, name: str) -> Word | None:
        if home := self.home(name):
            word = self.add(start, name, "local", near=home[2])
            word.scope = home[0]
            return word
        return None

    def visit_Name(self, node: ast.Name) -> None:
        start, scope = self.text.at(node.lineno, node.col_offset), self.scopes[-1] if self.scopes else None
        if scope and isinstance(scope[0], ast.ClassDef) and isinstance(node.ctx, ast.Store):
            word = self.add(start, node.id, "member", near=SELF)
        else:
            word = self.local(start, node.id) or self.add(start, node.id, "name", self.text.bound.get(node.id, ""))
        self.text.of_node[id(node)] = word

    def visit_Attribute(self, node: ast.Attribute) -> None:
        path = self.meaning(node)
        if path and path == ast.unparse(node):  # import a.b; a.b.c
            start = self.text.at(node.lineno, node.col_offset)
            self.text.of_node[id(node)] = self.add(start, path, "path", path)
            return
        self.visit(node.value)
        assert node.end_lineno and node.end_col_offset
        end = self.text.at(node.end_lineno, node.end_col_offset)
        word = self.add(end - len(node.attr), node.attr, "member", path, self.last(node.value))
        self.text.of_node[id(node)] = word

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        for keyword in node.keywords:
            if keyword.arg:
                start = self.text.at(keyword.lineno, keyword.col_offset)
                self.add(start, keyword.arg, "keyword", near=self.last(node.func))

    def visit_arg(self, node: ast.arg) -> None:
        self.local(self.text.at(node.lineno, node.col_offset), node.arg)
        self.generic_visit(node)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        outer, self.quoted = self.quoted, self.quoted or node
        self.generic_visit(node)
        self.quoted = outer

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self.add(self.text.at(alias.lineno, alias.col_offset), alias.name, "path", alias.name)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        for alias in node.names if node.module else ():
            start = self.text.at(alias.lineno, alias.col_offset)
            self.add(start, alias.name, "name", f"{node.module}.{alias.name}")

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self._inside(node, {a.arg for a in ast.walk(node.args) if isinstance(a, ast.arg)}, None)

    def visit_ListComp(self, node: Comprehension) -> None:
        self._inside(node, {n.id for part in node.generators for n in _stored(part.target)}, None)

    visit_SetComp = visit_DictComp = visit_GeneratorExp = visit_ListComp

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._inside(node, set(), self._defined(node))

    def visit_FunctionDef(self, node: FunctionNode) -> None:
        for outside in (*node.decorator_list, *node.args.defaults, *filter(None, node.args.kw_defaults)):
            self.visit(outside)
        self._inside(node, locals_of(node), self._defined(node))

    visit_AsyncFunctionDef = visit_FunctionDef

    def _defined(self, node: FunctionNode | ast.ClassDef) -> Word:
        """The word behind `def` or `class`."""
        begin = self.text.at(node.lineno, node.col_offset)
        match = re.compile(r"(?:async\s+def|def|class)\s+(\w+)").match(self.text.text, begin)
        assert match
        within = self.scopes[-1] if self.scopes else None
        if within and not isinstance(within[0], ast.ClassDef):
            return self.local(match.start(1), node.name) or self.add(match.start(1), node.name, "name")
        classes = [scope[0].name for scope in self.scopes if isinstance(scope[0], ast.ClassDef)]
        path = ".".join([self.text.module, *classes, node.name]) if self.text.module else ""
        return self.add(match.start(1), node.name, "member" if within else "name", path, SELF if within else None)

    def _inside(self, node: Scope, names: set[str], word: Word | None) -> None:
        self.scopes.append((node, names, word))
        if isinstance(node, FunctionNode):
            kept = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs, node.args.vararg, node.args.kwarg]
            for part in (*filter(None, kept), *filter(None, [node.returns]), *node.body):
                self.visit(part)
        else:
            self.generic_visit(node)
        self.scopes.pop()


def locals_of(node: FunctionNode) -> set[str]:
    """Names that a function binds: parameters, what it stores, what it defines."""
    inside = [n for part in (node.args, *node.body) for n in ast.walk(part)]
    elsewhere = {id(n) for c in inside if isinstance(c, ast.comprehension) for n in _stored(c.target)}
    found = {n.arg for n in inside if isinstance(n, ast.arg)}
    found |= {n.id for part in node.body for n in _stored(part) if id(n) not in elsewhere}
    found |= {n.name for n in inside if isinstance(n, FunctionNode | ast.ClassDef)}
    return found - {name for n in inside if isinstance(n, ast.Global) for name in n.names}


def bindings(tree: ast.Module, module: str) -> dict[str, str]:
    """Name: dotted path, of what a text imports anywhere, and of what it defines at its top."""
    found = {name: f"{module}.{name}" for name in module_names(tree.body)} if module else {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                found[alias.asname or alias.name.partition(".")[0]] = (
                    alias.name if alias.asname else alias.name.partition(".")[0]
                )
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return found


def renamed_cells(cells: Iterable[str], changes: Sequence[Change], ids: Iterable[str]) -> Iterator[str]:
    """A notebook's cells after the changes; one that is not Python stays as it is."""
    known: dict[str, str] = {}
    for cell in cells:
        try:
            fresh = renamed(cell, changes, ids, known=known)
            known |= bindings(Text(cell, "", {}).tree, "")
            yield fresh
        except SyntaxError:
            yield cell


def _stored(node: ast.AST) -> Iterator[ast.Name]:
    return (n for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))


def _span(node: ast.stmt | ast.expr) -> tuple[tuple[int, int], tuple[int, int]]:
    assert node.end_lineno is not None and node.end_col_offset is not None
    return (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)
