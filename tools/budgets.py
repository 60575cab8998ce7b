"""Prints how large the parts of the engine are, and how much of it a milestone runs: `python -m tools.budgets`.

Lines are lines of Python with docstrings and blanks; statements are counted beside them, so that dense code shows. A file
that no elective owns is core. A file runs if one of its functions does: importing it is not enough. The budgets are those
of the design; a line that exceeds its budget is marked.
"""

from __future__ import annotations

import ast
import inspect
import sys
import threading
import tomllib
from collections.abc import Iterable, Iterator
from fnmatch import fnmatch
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from types import FrameType

import folovllm
from tools.step_walk import PACKAGE, walk

ROOT = Path(__file__).resolve().parents[1]
NAMES = Path(__file__).with_name("elective_names.toml")
# Who owns a file, by its path in the package; the first part that matches. What no part names is core.
PARTS = {
    "hopper": ["electives/hopper/*"],
    "X1": ["electives/server/*", "electives/structured_output/*"],
    "X2": ["electives/quantization/*"],
    "X3": ["electives/spec_decode/*"],
    "X4": ["electives/moe/*"],
    "X5": ["electives/hybrid/*"],
    "X6": ["electives/rollouts/*"],
    "X7": ["electives/kv_transfer/*"],
    "inspector, bench, cli": ["apps/*"],
    "learn": ["learn/*"],
}
BUDGETS = {
    "M1": (45, 4_200), "M1 to M3": (57, 5_600), "core": (17_600,), "X1": (4_300,), "X2": (4_200,), "X3": (3_550,), "X4": (906,), "X5": (1_139,),
    "X6": (1_575,), "X7": (1_500,), "hopper": (764,), "inspector, bench, cli": (3_700,), "folovllm/": (37_000,),
    "tools/ without train_tiny": (3_000,), "tests/": (37_500,), "decode step of M6": (15, 12), "elective names in core": (54,),
    "import circles": (0,), "arrows from core to electives": (0,),
}  # fmt: skip
PRESETS = {
    "M1": [{"milestone": "m1", "model_impl": implementation} for implementation in ("hf", "native")],
    "M1 to M3": [{"milestone": "m2"}, {"milestone": "m3"}],
}


def part_of(file: str) -> str:
    """The part that owns a file, by its path in the package."""
    return next((part for part, patterns in PARTS.items() if any(fnmatch(file, p) for p in patterns)), "core")


@cache
def nodes(file: Path) -> list[ast.AST]:
    """All of a file's syntax tree."""
    return list(ast.walk(ast.parse(file.read_text())))


def size(files: Iterable[Path]) -> tuple[int, int]:
    """Lines and statements of Python files."""
    files = list(files)
    statements = sum(isinstance(node, ast.stmt) for file in files for node in nodes(file))
    return sum(file.read_text().count("\n") for file in files), statements


def imports(package: Path) -> dict[str, set[str]]:
    """Which file imports which: lazy imports and those for the type checker alone count, too."""
    relative = {file: file.relative_to(package).as_posix() for file in package.rglob("*.py")}
    modules = {
        f"{package.name}.{path}".removesuffix(".py").replace("/", ".").removesuffix(".__init__"): path
        for path in relative.values()
    }

    def named(file: Path) -> Iterator[str]:
        for node in nodes(file):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                inner = [f"{node.module}.{alias.name}" for alias in node.names]
                yield from [name for name in inner if name in modules] or [node.module]

    return {path: {modules[n] for n in named(file) if n in modules} - {path} for file, path in relative.items()}


def has_circle(graph: dict[str, set[str]]) -> bool:
    """Whether files import each other, directly or through others."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError:
        return True
    return False


def defined_names(tree: Iterable[ast.AST]) -> Iterator[str]:
    """Names of functions, classes, parameters, fields and attributes that a file's syntax tree defines."""
    for node in tree:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.id if isinstance(node, ast.Name) else node.attr


def elective_names(package: Path) -> list[tuple[str, str]]:
    """Where core files outside kernels/ and attention/ define a name that serves one elective alone: (file, name)."""
    listed = {name for names in tomllib.loads(NAMES.read_text()).values() for name in names}
    core = (file for file in sorted(package.rglob("*.py")) if part_of(file.relative_to(package).as_posix()) == "core")
    found = ((file.relative_to(package).as_posix(), listed & {*defined_names(nodes(file))}) for file in core)
    return [(file, name) for file, names in found if not file.startswith(("kernels/", "attention/")) for name in names]


def files_that_run(engines: list[dict[str, str]]) -> set[str]:
    """The files with a function that runs while each of these engines starts, answers two prompts and ends."""
    files = set[str]()

    def hear(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        is_function = code.co_name != "<module>" and code.co_flags & inspect.CO_NEWLOCALS  # a class's body is none
        if event == "call" and is_function and code.co_filename.startswith(PACKAGE):
            files.add(code.co_filename.removeprefix(PACKAGE))

    threading.setprofile(hear)
    sys.setprofile(hear)
    params = folovllm.SamplingParams(max_tokens=8, temperature=0.8, seed=1)
    for engine in engines:
        with folovllm.LLM("stories-5m", device="cpu", use_tqdm=False, **engine) as llm:
            llm.generate(["Once upon a time", "The red kite"], params, use_tqdm=False)
    sys.setprofile(None)
    threading.setprofile(None)
    return files


def sizes(root: Path) -> dict[str, tuple[int, ...]]:
    """Lines and statements of each part of the engine; then sets of files that import each other, and arrows to electives."""
    package = root / "folovllm"
    owned: dict[str, list[Path]] = {part: [] for part in ("core", *PARTS)}
    for file in sorted(package.rglob("*.py")):
        owned[part_of(file.relative_to(package).as_posix())].append(file)
    graph = imports(package)
    electives = [part for part in PARTS if part not in ("inspector, bench, cli", "learn")]
    arrows = sum(part_of(file) == "core" and part_of(other) in electives for file in graph for other in graph[file])
    return {
        **{part: size(files) for part, files in owned.items()},
        "folovllm/": size(package.rglob("*.py")),
        "elective names in core": (len(elective_names(package)),),
        "import circles": (int(has_circle(graph)),),
        "arrows from core to electives": (arrows,),
    }


def table() -> dict[str, tuple[int, ...]]:
    """All that is measured: `sizes`, and for a preset its files, their lines and statements."""
    found: dict[str, tuple[int, ...]] = {}
    files = set[str]()
    for name, engines in PRESETS.items():  # the second one goes on where the first one ended
        files |= files_that_run(engines)
        found[name] = (len(files), *size(ROOT / "folovllm" / file for file in files))
    entered = walk().files
    tools = [file for file in (ROOT / "tools").rglob("*.py") if "train_tiny" not in file.parts]
    return {
        **found,
        **sizes(ROOT),
        "tools/ without train_tiny": size(tools),
        "tests/": size((ROOT / "tests").rglob("*.py")),
        "decode step of M6": (len(set(entered)), len(entered) - len(set(entered))),
    }


def main() -> None:
    """Print a line for each budget."""
    print(f"{'':32}{'now':>24}{'at most':>16}   (files,) lines, statements")
    for name, now in table().items():
        most = BUDGETS.get(name, ())
        over = any(value > limit for value, limit in zip(now, most, strict=False))
        columns = ("".join(f"{value:>8,}" for value in values) for values in (now, most))
        print("{:32}{:>24}{:>16}{}".format(name, *columns, "   exceeded" if over else ""))


if __name__ == "__main__":
    main()
