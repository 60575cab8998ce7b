"""The code as of a milestone, without a copy of it: what one request executes under that preset, in call order."""

import ast
import json
import os
import runpy
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from milestones.manifest import Course
from milestones.tasks import Milestone

PROMPT = "Tell me a story about Lily and a red kite."


@dataclass(frozen=True, slots=True)
class Step:
    """A function of the engine when it is first called; `depth` counts the engine's functions above it."""

    phase: str
    depth: int
    name: str
    file: str  # relative to the package's parent
    line: int
    summary: str


def read(course: Course, milestone: Milestone) -> list[Step]:
    """Trace one request in a process of its own, always on the reference. `ValueError` with its last words if that fails.

    An elective says in `request.py` in its folder what the request is; `run` there is called with the preset and `enter`.
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

    enter("putting the engine together")
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
