"""Prints how large the parts of the engine are, and how much of it a milestone runs: `python -m tools.budgets`.

Lines are lines of Python with docstrings and blanks; statements are counted beside them, so that dense code shows. A file
that no elective owns is core. A file runs if one of its functions does: importing it is not enough. The budgets are those
of the design; a line that exceeds its budget is marked.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from fnmatch import fnmatch
from pathlib import Path

# Who owns a file, by its path in the package; the first part that matches. What no part names is core.
PARTS = {
    "hopper": ["hopper/*"],
    "X1": ["server/*", "structured_output/*"],
    "X2": ["quantization/*"],
    "X3": ["spec_decode/*"],
    "X4": ["moe/*"],
    "X5": ["hybrid/*"],
    "the demo of X6": ["rollouts/demo*.py"],  # its budget is its own: about 200 lines
    "X6": ["rollouts/*"],
    "inspector, bench, cli": [
        "inspector/*", "bench/*", "cli/*", "cli.py", "cli/conversation.py", "cli/terminal.py", "cli/flags.py", "cli/show.py", "watcher.py", "cli/remote.py",
    ],
}  # fmt: skip
BUDGETS = {
    "M1": (30, 3_800), "M1 to M3": (45, 5_200), "core": (14_500,), "X1": (4_000,), "X2": (4_900,), "X3": (2_700,), "X4": (1_200,), "X5": (2_500,),
    "X6": (1_500,), "the demo of X6": (250,),
    "hopper": (700,), "inspector, bench, cli": (3_500,), "folovllm/": (31_500,), "tools/ without train_tiny": (2_500,),
    "decode step of M6": (16, 25), "import circles": (0,), "arrows from core to electives": (0,),
}  # fmt: skip


def part_of(file: str) -> str:
    """The part that owns a file, by its path in the package."""
    return next((part for part, patterns in PARTS.items() if any(fnmatch(file, p) for p in patterns)), "core")


def size(files: Iterable[Path]) -> tuple[int, int]:
    """Lines and statements of Python files."""
    texts = [file.read_text() for file in files]
    statements = sum(isinstance(node, ast.stmt) for text in texts for node in ast.walk(ast.parse(text)))
    return sum(text.count("\n") for text in texts), statements


def imports(package: Path) -> dict[str, set[str]]:
    """Which file imports which: lazy imports and those for the type checker alone count, too."""
    modules = {
        file.relative_to(package.parent).with_suffix("").as_posix().replace("/", "."): file
        for file in package.rglob("*.py")
    }
    modules |= {name.removesuffix(".__init__"): file for name, file in modules.items() if name.endswith(".__init__")}

    def named(tree: ast.AST) -> Iterator[str]:
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                inner = [f"{node.module}.{alias.name}" for alias in node.names]
                yield from [name for name in inner if name in modules] or [node.module]

    files = {
        file: {modules[n] for n in named(ast.parse(file.read_text())) if n in modules} for file in set(modules.values())
    }
    relative = {file: file.relative_to(package).as_posix() for file in files}
    return {relative[file]: {relative[other] for other in others} - {relative[file]} for file, others in files.items()}


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Sets of two files and more that import each other, directly or through others (Tarjan's components)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(file: str) -> None:
        index[file] = low[file] = len(index)
        stack.append(file)
        for other in sorted(graph[file]):
            if other not in index:
                visit(other)
            if other in stack:
                low[file] = min(low[file], low[other])
        if low[file] == index[file]:
            cut = stack.index(file)
            found.append(stack[cut:])
            del stack[cut:]

    sys.setrecursionlimit(10_000)
    for file in sorted(graph):
        if file not in index:
            visit(file)
    return [sorted(circle) for circle in found if len(circle) > 1]


RUN = """
import json, sys, threading
from pathlib import Path
import folovllm
package = str(Path(folovllm.__file__).parent) + "/"
files = set()
def hear(frame, event, _):
    code = frame.f_code
    if event == "call" and code.co_filename.startswith(package) and "<module>" != code.co_name and code.co_flags & 2:
        files.add(code.co_filename[len(package):])  # a function or a method: a class's body is no call
threading.setprofile(hear); sys.setprofile(hear)
from folovllm import LLM, SamplingParams
for arguments in json.loads(sys.argv[1]):
    with LLM("stories-5m", device="cpu", use_tqdm=False, **arguments) as llm:
        llm.generate(["Once upon a time", "The red kite"], SamplingParams(max_tokens=8, temperature=0.8, seed=1))
sys.setprofile(None)
print(json.dumps(sorted(files)))
"""
M1 = [{"milestone": "m1", "model_impl": implementation} for implementation in ("hf", "native")]


def files_that_run(root: Path, engines: list[dict[str, str]]) -> list[str]:
    """The files with a function that runs while each of these engines starts, answers two prompts and ends."""
    done = subprocess.run(
        [sys.executable, "-c", RUN, json.dumps(engines)],
        cwd=root,
        env=environment(root),
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def environment(root: Path) -> dict[str, str]:
    """That of a child which imports the tree at `root`."""
    return {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}


def walk_of_a_step(root: Path) -> tuple[int, int]:
    """Files that a decode step of M6 enters, and how often it returns to one."""
    command = [sys.executable, "tools/step_walk.py"]
    done = subprocess.run(command, cwd=root, env=environment(root), capture_output=True, text=True, check=True)
    files, returns, *_ = (int(word) for word in done.stdout.split() if word.isdigit())
    return files, returns


def sizes(root: Path) -> dict[str, tuple[int, ...]]:
    """Lines and statements of each part of the engine; then sets of files that import each other, and arrows to electives."""
    package = root / "folovllm"
    owned: dict[str, list[Path]] = {part: [] for part in ("core", *PARTS)}
    for file in sorted(package.rglob("*.py")):
        owned[part_of(file.relative_to(package).as_posix())].append(file)
    graph = imports(package)
    electives = [part for part in PARTS if part != "inspector, bench, cli"]
    arrows = sum(part_of(file) == "core" and part_of(other) in electives for file in graph for other in graph[file])
    return {
        **{part: size(files) for part, files in owned.items()},
        "folovllm/": size(package.rglob("*.py")),
        "import circles": (len(circles(graph)),),
        "arrows from core to electives": (arrows,),
    }


def table(root: Path) -> dict[str, tuple[int, ...]]:
    """All that is measured: `sizes`, and for a preset its files, their lines and statements."""
    found: dict[str, tuple[int, ...]] = {}
    for name, engines in {"M1": M1, "M1 to M3": [*M1, {"milestone": "m2"}, {"milestone": "m3"}]}.items():
        files = files_that_run(root, engines)
        found[name] = (len(files), *size(root / "folovllm" / file for file in files))
    tools = [file for file in (root / "tools").rglob("*.py") if "train_tiny" not in file.parts]
    return {
        **found,
        **sizes(root),
        "tools/ without train_tiny": size(tools),
        "tests/": size((root / "tests").rglob("*.py")),
        "decode step of M6": walk_of_a_step(root),
    }


def main() -> None:
    """Print a line for each budget."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    print(f"{'':32}{'now':>24}{'at most':>16}   (files,) lines, statements")
    for name, now in table(Path(__file__).resolve().parents[1]).items():
        most = BUDGETS.get(name, ())
        over = any(value > limit for value, limit in zip(now, most, strict=False))
        columns = ("".join(f"{value:>8,}" for value in values) for values in (now, most))
        print("{:32}{:>24}{:>16}{}".format(name, *columns, "   exceeded" if over else ""))


if __name__ == "__main__":
    main()
