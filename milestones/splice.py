"""Cut a function's body out of a source text, and put another in: the one engine of start, reset, update and wrong answers.

A function is whole lines: decorators, signature and docstring are its *head*, the rest, with comments behind the last
statement that are indented deeper than `def`, its *body*. Text is moved, never regenerated, so that everything outside
the bodies stays as it is, to the letter.
"""

import ast
import io
import re
import tokenize
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

from milestones.tasks import EXERCISE_ID

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Function:
    """One function of a source text; `start` and `end` are its lines, counted from 0, `end` exclusive."""

    start: int
    end: int
    text: str
    line: int  # of `def`, counted from 1, as editors do
    head: str
    body: tuple[str, ...]
    frozen: frozenset[int]  # lines of the body that begin inside a string: indenting them would change its value
    indent: str  # of `def`
    jit: bool
    node: FunctionNode

    def body_at(self, indent: str) -> str:
        """The body with its first statement indented by `indent`."""
        statement = next((line for line in self.body if line.strip() and not line.lstrip().startswith("#")), "")
        old = statement[: len(statement) - len(statement.lstrip())]

        def moved(number: int, line: str) -> str:
            if number in self.frozen or not line.strip():
                return line if number in self.frozen else ""
            return indent + (line.removeprefix(old) if line.startswith(old) else line.lstrip())

        return "\n".join(moved(number, line) for number, line in enumerate(self.body))


@lru_cache(maxsize=8)
def functions(source: str) -> tuple[tuple[str, FunctionNode], ...]:
    """(qualified name, node) of every function and method, also those under `if` and `try`, not those inside functions."""

    def walk(statements: Iterable[ast.stmt], prefix: str) -> Iterator[tuple[str, FunctionNode]]:
        for node in statements:
            if isinstance(node, FunctionNode):
                if not _secondary(node):
                    yield prefix + node.name, node
            elif isinstance(node, ast.ClassDef):
                yield from walk(node.body, f"{prefix}{node.name}.")
            else:
                yield from walk(_nested(node), prefix)

    return tuple(walk(ast.parse(source).body, ""))


def find(source: str, name: str) -> Function:
    """The function of that qualified name. `LookupError` if there is none, or more than one definition."""
    nodes = [node for qualified, node in functions(source) if qualified == name]
    if len(nodes) != 1:
        raise LookupError(f"{len(nodes)} definitions of {name}")
    return _measure(source, nodes[0])


def replace(source: str, name: str, head: str, body: str) -> str:
    """`source` with the named function made of this head and body; every other line is kept."""
    old, lines = find(source, name), source.split("\n")
    lines[old.start : old.end] = [head, body] if body else [head]
    return "\n".join(lines)


def graft(into: str, name: str, origin: str, there: str | None = None, first: Iterable[str] = ()) -> str:
    """`into` with the body that the named function has in `origin`, where it may be called `there`, `first` these statements.

    Signature and docstring stay those of `into`.
    """
    target = find(into, name)
    indent = target.indent + "    "
    body = find(origin, there or name).body_at(indent)
    return replace(into, name, target.head, "\n".join([*(indent + line for line in first), body]))


def transplant(into: str, name: str, origin: str) -> str:
    """`into` with the whole function of `origin`, decorators and all. `SyntaxError` if the result is none of Python's."""
    ast.parse(text := replace(into, name, find(origin, name).text, ""))
    return text


def same_body(one: str, other: str, name: str) -> bool:
    return find(one, name).body_at("") == find(other, name).body_at("")


def stub_text(exercise: str, name: str) -> str:
    """What marks an unwritten exercise, in its body and in the exception that it raises."""
    return f'"{exercise}: {name}"'


def is_stub(source: str, name: str) -> bool:
    """Whether the function is an unwritten exercise of any id, or the text at least says so where it is not Python."""
    return re.search(rf'"{EXERCISE_ID}: {re.escape(name)}"', source) is not None


def blank(source: str, stubs: Mapping[str, str]) -> str:
    """`source` with the body of each function in `stubs` (qualified name: exercise id) replaced by a stub that names it."""
    lines, found = source.split("\n"), {name: find(source, name) for name in stubs}
    for name, function in sorted(found.items(), key=lambda item: -item[1].start):
        stub = f"{_language(source)}.static_assert(False, " if function.jit else "raise NotImplementedError("
        body = f"{function.indent}    {stub}{stub_text(stubs[name], name)})"
        lines[function.start : function.end] = [function.head, body]
    return "\n".join(lines)


def in_reach(source: str, node: FunctionNode) -> list[str]:
    """What the body uses of `self`, then of its module, in alphabetical order: a learner may use it too."""
    inside = [n for statement in node.body for n in ast.walk(statement)]
    used = {n.id for n in inside if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
    mine = {ast.unparse(n) for n in inside if isinstance(n, ast.Attribute) and ast.unparse(n.value) in ("self", "cls")}
    local = {a.arg for a in ast.walk(node.args) if isinstance(a, ast.arg)}
    local |= {n.id for n in inside if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    return sorted(mine) + sorted(used & module_names(ast.parse(source).body) - local)


def module_names(body: Iterable[ast.stmt]) -> set[str]:
    """What a module's statements bind: imports, functions, classes and variables."""
    names: set[str] = set()
    for node in body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        elif isinstance(node, FunctionNode | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            names |= {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        else:
            names |= module_names(_nested(node))
    return names


def _nested(node: ast.stmt) -> Iterator[ast.stmt]:
    """The statements directly in the blocks of an `if`, `try`, `with`, `for` or `match`."""
    for block in (node, *getattr(node, "handlers", []), *getattr(node, "cases", [])):
        for field in ("body", "orelse", "finalbody"):
            yield from getattr(block, field, [])


def _secondary(node: FunctionNode) -> bool:
    """Overload stubs and property setters: a second definition of a name that has its own."""
    names = {ast.unparse(decorator).rpartition(".")[2] for decorator in node.decorator_list}
    return bool(names & {"overload", "setter", "deleter"})


def _jit(node: FunctionNode) -> bool:
    calls = (d.func if isinstance(d, ast.Call) else d for d in node.decorator_list)
    return any(ast.unparse(call) in ("triton.jit", "jit") for call in calls)


def _language(source: str) -> str:
    """The name by which a module knows triton.language."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            base = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            for alias in node.names:
                if base + alias.name == "triton.language" and (alias.asname or base):
                    return alias.asname or alias.name
    return "triton.language"


def _colon(lines: list[str], line: int) -> tuple[int, int]:
    """(line, column behind it) of the colon that ends the signature beginning at `line`, lines counted from 0."""
    depth = 0
    text = io.StringIO("\n".join(lines[line:]))
    for token in tokenize.generate_tokens(text.readline):
        depth += (token.string in ("(", "[", "{")) - (token.string in (")", "]", "}"))
        if token.type == tokenize.OP and token.string == ":" and depth == 0:
            return line + token.end[0] - 1, token.end[1]
    raise AssertionError("a parsed function has a colon")


def _measure(source: str, node: FunctionNode) -> Function:
    lines = source.split("\n")
    start = min([node.lineno, *(d.lineno for d in node.decorator_list)]) - 1
    indent = lines[node.lineno - 1][: node.col_offset]
    row, column = _colon(lines, node.lineno - 1)
    head = [*lines[start:row], lines[row][:column]]
    if ast.get_docstring(node, clean=False) is not None:
        said, first = node.body[0], node.body[0].lineno - 1
        assert said.end_lineno is not None and said.end_col_offset is not None
        end = len(lines[said.end_lineno - 1].encode()[: said.end_col_offset].decode())  # ast counts bytes
        if first == row:  # def f(): "doc"; return 1
            head.append(f"{indent}    {ast.get_source_segment(source, said)}")
        else:
            head = [*lines[start : said.end_lineno - 1], lines[said.end_lineno - 1][:end]]
        row, column = said.end_lineno - 1, end
    rest = lines[row][column:].lstrip("; \t")
    inline = bool(rest) and not rest.startswith("#")
    if not inline:
        head[-1] += lines[row][column:]
    assert node.end_lineno is not None
    end = _trailing_comments(lines, node.end_lineno, node.col_offset)
    body = [rest] * inline + lines[row + 1 : end]
    offset = row + 1 - inline
    frozen = frozenset(number - offset for number in _string_lines(node) if number >= offset)
    text = "\n".join(lines[start:end])
    return Function(start, end, text, node.lineno, "\n".join(head), tuple(body), frozen, indent, _jit(node), node)


def _trailing_comments(lines: list[str], end: int, column: int) -> int:
    """Where a function ends when comments behind its last statement count as its own."""
    for number in range(end, len(lines)):
        text = lines[number].lstrip()
        if text and not (text.startswith("#") and len(lines[number]) - len(text) > column):
            break
        end = number + 1 if text else end
    return end


def _string_lines(node: ast.AST) -> Iterator[int]:
    """Lines, counted from 0, that begin inside a string literal."""
    for n in ast.walk(node):
        if isinstance(n, ast.JoinedStr) or (isinstance(n, ast.Constant) and isinstance(n.value, str | bytes)):
            yield from range(n.lineno, n.end_lineno or n.lineno)
