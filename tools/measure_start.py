"""From the start of a process to its first token: what takes how long, and which kernels are compiled.

    TRITON_CACHE_DIR=$(mktemp -d) python tools/measure_start.py     cold: no kernel is compiled yet
    python tools/measure_start.py                                   warm, from the second time on
    python tools/measure_start.py --geometry qwen3-4b --kernels     another geometry; each kernel that was compiled

The weights are random. One process is one start: for cold and warm, run it twice with the same TRITON_CACHE_DIR.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PHASES = {  # of a `GraphRunner`, in order
    "load_model": "weights",
    "compile_at_once": "kernels, many at once",
    "fit_kv_cache": "memory profile",
    "compile_kernels": "small steps",
    "capture_cudagraph": "capture",
}
HEAVY = ("transformers", "torch._dynamo", "sympy", "sklearn", "pandas")  # seconds to import


class Clock:
    """Seconds since the process started, by phase; a phase within another is the other's."""

    def __init__(self) -> None:
        ticks = int(Path("/proc/self/stat").read_text(encoding="ascii").rpartition(")")[2].split()[19])
        self._born = ticks / os.sysconf("SC_CLK_TCK")
        self._last, self._within = 0.0, False
        self.phases: dict[str, float] = {}

    def now(self) -> float:
        """Seconds since the process started."""
        return time.clock_gettime(time.CLOCK_BOOTTIME) - self._born

    def add(self, phase: str) -> None:
        """All since the last call was this phase."""
        now = self.now()
        self.phases[phase] = self.phases.get(phase, 0.0) + now - self._last
        self._last = now

    def watch(self, owner: Any, name: str, phase: str) -> None:
        """Let the calls of a method be a phase."""
        method: Callable[..., Any] = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._within:
                return method(*args, **kwargs)
            self.add("the rest")
            self._within = True
            try:
                return method(*args, **kwargs)
            finally:
                self._within = False
                self.add(phase)

        setattr(owner, name, timed)


class Compiled:
    """Which kernels Triton looked for, and how long those took that were not there: it calls this after each."""

    def __init__(self) -> None:
        self._num_found = 0
        self._new: list[tuple[float, str]] = []

    def __call__(self, *, src: Any, times: Any, cache_hit: bool, **_: Any) -> None:
        """Note a kernel."""
        self._num_found += 1
        if not cache_hit:
            self._new.append((times.total / 1e6, src.name))

    def watch(self, workers: Any) -> None:
        """Note those that other processes compile, too. Triton finds them here afterwards."""
        compile_task: Callable[[Any, Any], None] = workers.compile

        def timed(self_: Any, task: Any) -> None:
            start = time.monotonic()
            compile_task(self_, task)
            self._new.append((time.monotonic() - start, task.name))

        workers.compile = timed

    def print(self, each: bool) -> None:
        """Say how many there were; with `each` name those that were compiled, the slowest first."""
        total = sum(seconds for seconds, _ in self._new)
        print(f"{self._num_found} kernels, {len(self._new)} of them compiled; for these, threads waited {total:.1f} s")
        for seconds, name in sorted(self._new, reverse=True) if each else ():
            print(f"  {seconds:6.2f} s  {name}")


def main() -> None:
    """Start, and print the phases."""
    clock, compiled = Clock(), Compiled()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--geometry", default="qwen3-0.6b")
    parser.add_argument("--kernels", action="store_true")
    given = parser.parse_args()
    clock.add("Python")
    import torch

    clock.add("import torch")
    from folovllm import LLM, SamplingParams
    from folovllm.bench.contenders import random_model

    watch_phases(clock)
    clock.add("import folovllm")
    from triton import knobs

    from folovllm.kernels.compile_pool import CompilePool

    knobs.compilation.listener = compiled
    compiled.watch(CompilePool)
    clock.add("import triton")
    with (
        tempfile.TemporaryDirectory() as folder,
        LLM(**random_model(given.geometry, Path(folder), {"use_tqdm": False})) as llm,
    ):
        clock.add("the rest")
        llm.generate([list(range(100))], SamplingParams(max_tokens=1), use_tqdm=False)
        clock.add("first token")
        total = clock.now()
    for phase, seconds in clock.phases.items():
        print(f"{phase:24}{seconds:8.2f} s")
    print(f"{'to the first token':24}{total:8.2f} s")
    print(
        "torch's byte code:",
        "kept" if Path(torch.__spec__.cached).exists() else "none, so its sources were compiled once more",
    )
    print("imported on the way:", ", ".join(name for name in HEAVY if name in sys.modules) or "nothing heavy")
    compiled.print(given.kernels)


def watch_phases(clock: Clock) -> None:
    """Let the engine's calls be phases."""
    from folovllm.engine import llm_engine
    from folovllm.worker.graph_runner import GraphRunner
    from folovllm.worker.model_runner import ModelRunner

    clock.watch(llm_engine, "set_up", "configuration")
    clock.watch(llm_engine, "load_tokenizer", "tokenizer")
    for name, phase in PHASES.items():
        clock.watch(ModelRunner if name == "fit_kv_cache" else GraphRunner, name, phase)


if __name__ == "__main__":
    main()
