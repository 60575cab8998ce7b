"""The code as of a milestone, without a copy of it: what one request executes under that preset, in call order."""

import ast
import json
import os
import re
import runpy
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from milestones.manifest import Course
from milestones.tasks import PACKAGE, Milestone

PROMPT = "Tell me a story about Lily and a red kite."

# What checks a user's values and files, reports, or is for other libraries' users: no part of how a token is made.
ASIDE_FILES = (
    "__init__.py", "distributed/children.py", "config.py", "distributed/cores.py", "plugins.py", "engine/metrics.py",
    "engine/event_stream.py", "engine/events.py", "engine/extension.py", "models/written_files.py", "engine/inputs.py", "models/files.py",
    "models/shapes.py", "outputs.py",
    "engine/require.py", "sampling_params.py", "engine/spelling.py", "engine/ctrl_c.py", "models/quick_start.py",
)  # fmt: skip
ASIDE_NAMES = re.compile(
    r"Speeds|added|[Qq]uantization|(use|most|choose)_threads|(.*\.)?_?(require|check|validate|speeds|(un)?subscribe|snapshot|heed)|.*<locals>"
)
SETUP = "putting the engine together"
OWN_SETUP = "putting it together with our own layers"


@dataclass(frozen=True, slots=True)
class Step:
    """A function of the engine when it is first called; `depth` counts the engine's functions above it."""

    phase: str
    depth: int
    name: str
    file: str  # relative to the package's parent
    line: int
    summary: str


def shortened(steps: list[Step], exercises: Collection[tuple[str, str]] = ()) -> list[Step]:
    """The request first, then how the engine was put together, without what stands aside (`ASIDE_FILES`, `ASIDE_NAMES`).

    An exercise, by file and name, is never left out. Indentation is that of the functions that are left.
    """
    kept, open_steps = [], list[tuple[int, bool]]()  # a step's depth, and whether it is shown
    for step in steps:
        while open_steps and open_steps[-1][0] >= step.depth:
            open_steps.pop()
        is_aside = step.file.partition("/")[2] in ASIDE_FILES or ASIDE_NAMES.match(step.name) is not None
        is_shown = (step.file, step.name) in exercises or not is_aside
        if is_shown:
            kept.append(replace(step, depth=sum(shown for _, shown in open_steps)))
        open_steps.append((step.depth, is_shown))
    return sorted(kept, key=lambda step: step.phase in (SETUP, OWN_SETUP))


def also_listed(course: Course, milestone: Milestone, shown: list[Step]) -> list[str]:
    """The milestone's files in docs/reading_order.md of which nothing is shown: records and protocols, which run nothing, and checks."""
    page = course.root / "docs" / "reading_order.md"
    text = page.read_text("utf-8") if page.is_file() else ""
    table = text.partition(f"<!-- files {milestone.id} -->")[2].partition("<!-- end of files -->")[0]
    files = [f"{PACKAGE}/{name}" for name in re.findall(r"^\| `(\S+)`", table, re.MULTILINE)]
    return [file for file in files if file not in {step.file for step in shown}]


def read(course: Course, milestone: Milestone) -> list[Step]:
    """Trace one request in a process of its own, always on the reference. `ValueError` with its last words if that fails.

    Electives and M1 say in `request.py` in their folders what the request is; `run` there is called with the preset and `enter`.
    """
    environment = {k: v for k, v in os.environ.items() if k != "FOLOVLLM_MINE"}
    scripts = [str(file) for file in [milestone.folder / "request.py"] if file.is_file()]
    command = [sys.executable, "-m", "milestones.trace", milestone.preset, *scripts]
    done = subprocess.run(command, cwd=course.root, env=environment, capture_output=True, text=True)
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1]
        raise ValueError(f"{last}; all of it: python {' '.join(command[1:])}")
    return [Step(**step) for step in json.loads(done.stdout.splitlines()[-1])]


class Tracer:
    """Notes each function under `package` when it is called for the first time, in whichever thread; not while one imports."""

    def __init__(self, package: Path) -> None:
        self.package, self.phase = f"{package}{os.sep}", ""
        self.depths: defaultdict[int, int] = defaultdict(int)  # thread: functions of the package that are running
        self.imports: defaultdict[int, int] = defaultdict(int)  # thread: modules that are being imported
        self.first: dict[CodeType, tuple[str, int]] = {}

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event not in ("call", "return") or not code.co_filename.startswith(self.package):
            return
        thread, change = threading.get_ident(), 1 if event == "call" else -1
        if code.co_name == "<module>":
            self.imports[thread] += change
        elif "<" not in code.co_name and not self.imports[thread]:
            if event == "call":
                self.first.setdefault(code, (self.phase, self.depths[thread]))
            self.depths[thread] += change

    def enter(self, phase: str) -> None:
        """From here on, what is called belongs to this phase."""
        self.phase = phase

    def steps(self) -> Iterator[Step]:
        for code, (phase, depth) in self.first.items():
            node = _functions(code.co_filename).get(code.co_firstlineno)
            if node:  # generated methods, a dataclass's say, have none
                file = os.path.relpath(code.co_filename, Path(self.package).parent)
                summary = (ast.get_docstring(node) or "").partition("\n")[0]
                yield Step(phase, depth, code.co_qualname, file, node.lineno, summary)


@cache
def _functions(file: str) -> dict[int, ast.FunctionDef | ast.AsyncFunctionDef]:
    """Functions by their first line, decorators included, which is what a code object knows of itself."""
    nodes = ast.walk(ast.parse(Path(file).read_text(encoding="utf-8")))
    found = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return {min([node.lineno, *(d.lineno for d in node.decorator_list)]): node for node in found}


def generate(preset: str, enter: Callable[[str], None]) -> None:
    """What a milestone's request is; `enter` begins a phase."""
    import folovllm

    enter(SETUP)
    llm = folovllm.LLM(milestone=preset)
    enter("one request")
    llm.generate(PROMPT, folovllm.SamplingParams(max_tokens=8, temperature=0))


def main(preset: str, script: str = "") -> None:
    import folovllm

    run = runpy.run_path(script)["run"] if script else generate
    tracer = Tracer(Path(folovllm.__file__).parent)
    threading.setprofile(tracer)  # of threads that are not there yet
    sys.setprofile(tracer)
    run(preset, tracer.enter)
    sys.setprofile(None)
    threading.setprofile(None)
    print("\n" + json.dumps([{f: getattr(step, f) for f in Step.__slots__} for step in tracer.steps()]))


if __name__ == "__main__":
    main(*sys.argv[1:])
