"""`python -m tests.course.solved NAME`: store a `mine/` with every exercise and builder solved, as of this commit.

What is stored is small: of each file its imports and the exercises' functions, without docstrings. `test_solved.py` updates
each of them to today's reference. Store another before a piece of work that renames or moves what exercises are or use.
"""

import ast
import json
import lzma
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from milestones import splice
from milestones.check import run_tests, verdict
from milestones.manifest import Course
from milestones.mine import Mine, State, by_file
from milestones.renames import dotted, follow
from milestones.tasks import Exercise, Symbol

DATA = Path(__file__).resolve().parent / "data"
Snapshot = dict[str, Any]


def snapshot(course: Course) -> Snapshot:
    """All bodies of the reference, as a learner's: {path: text}, the symbols, how many renames they have seen."""
    files = {str(p): skeleton(course.source(p), names(course, p)) for p in sorted(by_file(course.exercises))}
    builders = {str(b.path): without_docstrings(b.reference.read_text("utf-8")) for b in course.builders}
    symbols = [str(symbol) for exercise in course.exercises for symbol in exercise.symbols]
    return {"changes": len(course.changes), "symbols": sorted(symbols), "files": files, "builders": builders}


def names(course: Course, path: Path) -> set[str]:
    return {symbol.name for exercise in course.exercises for symbol in exercise.symbols if symbol.path == path}


def skeleton(source: str, kept: set[str]) -> str:
    """A module's imports, these of its functions, and `...` for what else of the module they use."""
    nodes = dict(splice.functions(source))
    used = {word for name in kept for word in splice.in_reach(source, nodes[name])}

    def cut(body: list[ast.stmt], prefix: str) -> list[ast.stmt]:
        found: list[ast.stmt] = []
        for node in body:
            if isinstance(node, ast.ClassDef):
                node.body = cut(node.body, f"{prefix}{node.name}.")
                found += [node] if node.body else stand_ins([node])
            elif isinstance(node, ast.Import | ast.ImportFrom) or f"{prefix}{getattr(node, 'name', '')}" in kept:
                found.append(node)
            elif isinstance(node, ast.If | ast.Try):  # of imports, or of functions where a library is there
                node.body = cut(node.body, prefix) or [ast.Pass()]
                found.append(node)
            else:
                found += stand_ins([node])
        return found

    def stand_ins(nodes: list[ast.stmt]) -> list[ast.stmt]:
        return [ast.parse(f"{word} = ...").body[0] for word in sorted(splice.module_names(nodes) & used)]

    tree = ast.parse(source)
    tree.body = cut(tree.body, "")
    return without_docstrings(ast.unparse(ast.fix_missing_locations(tree)))


@cache
def without_docstrings(source: str) -> str:
    """The text as Python writes it, without docstrings: two that are equal do the same."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | splice.FunctionNode) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return ast.unparse(tree) + "\n"


def restore(stored: Snapshot, mine: Mine) -> Mine:
    """Make the learner's folder that was stored."""
    for path, text in stored["files"].items():
        mine.write(Path(path), text, base=text)
    for path, text in stored["builders"].items():
        mine.write(Path(path), text)
    started = [milestone.id for milestone in mine.course.milestones]
    mine.save(State(started=started, blanked=list(stored["symbols"]), changes=stored["changes"]))
    return mine


def body(source: str, name: str) -> str:
    """A function's body as Python writes it."""
    return ast.unparse(ast.Module(dict(splice.functions(without_docstrings(source)))[name].body, []))


def differs(mine: Mine, symbol: Symbol) -> bool:
    """Whether a body is not the reference's, which is known to pass."""
    return body(mine.read(symbol.path) or "", symbol.name) != body(mine.course.source(symbol.path), symbol.name)


def lost(mine: Mine, said: Iterable[str], exercises: Iterable[Exercise]) -> list[str]:
    """Update has come: exercises that are neither green nor named as cut out, and builders likewise."""
    named = [line.partition(" is cut out afresh")[0] for line in said if " is cut out afresh" in line]
    wrong, doubtful = [], []
    for exercise in exercises:
        names = mine.blanks(exercise) or [symbol.name for symbol in exercise.symbols if mine.missing(exercise)]
        if blank := [name for name in names if f"{exercise.id} {name}" not in named]:
            wrong.append(f"{exercise.id} {', '.join(blank)}: what was written is gone")
        elif not names and any(differs(mine, symbol) for symbol in exercise.symbols):
            doubtful.append(exercise)
    components = [b for b in mine.course.builders if (mine.folder / b.path).is_file() and b.id not in named]
    other = [
        b
        for b in components
        if without_docstrings(mine.read(b.path) or "") != without_docstrings(b.reference.read_text("utf-8"))
    ]
    nodes = [test for task in (*doubtful, *other) for test in task.tests]
    outcomes = run_tests(mine, ["-q", "--timeout=60", *dict.fromkeys(nodes)], quiet=True)[1] if nodes else {}
    states = {exercise.id: verdict(mine, exercise, outcomes) for exercise in doubtful}
    for builder in other:
        # A test in the engine may meet an exercise that was cut out, and says so.
        cut = {line.split()[0] for line in named}
        own = [o for node, (o, met) in outcomes.items() if node.startswith(builder.tests) and met not in cut]
        states[builder.id] = "failing" if not own or "failed" in own else "passing"
    return wrong + [f"{id}: {state}" for id, state in states.items() if state != "passing"]


def asked(stored: Snapshot, course: Course) -> tuple[list[Exercise], list[str]]:
    """The exercises that were solved there, and the places of which nobody says where they are."""
    now, found, nowhere = {dotted(str(s)): e for e in course.exercises for s in e.symbols}, [], []
    for place in stored["symbols"]:
        moved, contracts = follow(course.changes[stored["changes"] :], dotted(place))
        if moved in now:
            found.append(now[moved])
        elif not contracts:
            nowhere.append(f"{place}: neither an exercise nor in milestones/renames.toml")
    return list(dict.fromkeys(found)), nowhere


def main(name: str) -> None:
    """Store this commit's."""
    course = Course(Path(__file__).resolve().parents[2])
    file = DATA / f"{name}.json.xz"
    file.write_bytes(lzma.compress(json.dumps(snapshot(course)).encode()))
    print(f"{file}: {file.stat().st_size:,} bytes")


if __name__ == "__main__":
    main(sys.argv[1])
