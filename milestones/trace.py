"""The code as of a milestone, without a copy of it: what one request executes under that preset, in call order."""

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from milestones.manifest import Course

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


def read(course: Course, preset: str) -> list[Step]:
    """Trace one request in a process of its own, always on the reference. `ValueError` with its last words if that fails."""
    environment = {k: v for k, v in os.environ.items() if k != "FOLOVLLM_MINE"}
    command = [sys.executable, "-m", "milestones.trace", preset]
    done = subprocess.run(command, cwd=course.root, env=environment, capture_output=True, text=True)
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1]
        raise ValueError(f"{last}; all of it: python -m milestones.trace {preset}")
    return [Step(**step) for step in json.loads(done.stdout.splitlines()[-1])]


class Tracer:
    """Notes each function under `package` when it is called for the first time."""

    def __init__(self, package: Path) -> None:
        self.package, self.phase, self.depth = f"{package}{os.sep}", "", 0
        self.first: dict[CodeType, tuple[str, int]] = {}

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event in ("call", "return") and code.co_filename.startswith(self.package) and "<" not in code.co_name:
            self.depth += 1 if event == "call" else -1
            if event == "call":
                self.first.setdefault(code, (self.phase, self.depth - 1))

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


def main(preset: str) -> None:
    import folovllm

    tracer = Tracer(Path(folovllm.__file__).parent)
    sys.setprofile(tracer)
    tracer.phase = "putting the engine together"
    llm = folovllm.LLM(milestone=preset)
    tracer.phase = "one request"
    llm.generate(PROMPT, folovllm.SamplingParams(max_tokens=8, temperature=0))
    sys.setprofile(None)
    print("\n" + json.dumps([{f: getattr(step, f) for f in Step.__slots__} for step in tracer.steps()]))


if __name__ == "__main__":
    main(sys.argv[1])
