"""From the start of a process to its first token: what takes how long, and which kernels are compiled.

    TRITON_CACHE_DIR=$(mktemp -d) python tools/measure_start.py     cold: no kernel is compiled yet
    python tools/measure_start.py                                   warm, from the second time on
    python tools/measure_start.py --geometry qwen3-4b --kernels     another geometry; each kernel that was compiled

The weights are random. One process is one start: for cold and warm, run it twice with the same TRITON_CACHE_DIR.
"""

from __future__ import annotations

import argparse
import os
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
    "capture_cudagraph": "recording",
}


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


def main() -> None:
    """Start, and print the phases."""
    clock = Clock()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--geometry", default="qwen3-0.6b")
    parser.add_argument("--kernels", action="store_true")
    given = parser.parse_args()
    clock.add("Python")
    import torch

    clock.add("import torch")
    import transformers  # noqa: F401

    clock.add("import transformers")
    from folovllm import LLM, SamplingParams
    from folovllm.bench.contenders import random_model
    from folovllm.worker.graph_runner import GraphRunner
    from folovllm.worker.model_runner import ModelRunner

    clock.add("import folovllm")
    torch.zeros(1, device="cuda")
    clock.add("CUDA")
    from triton import knobs

    compiled: list[tuple[float, str, bool]] = []

    def note(*, src: Any, times: Any, cache_hit: bool, **_: Any) -> None:
        compiled.append((times.total / 1e6, src.name, cache_hit))

    knobs.compilation.listener = note
    clock.add("import triton")
    for name, phase in PHASES.items():
        owner = ModelRunner if name == "fit_kv_cache" else GraphRunner
        if hasattr(owner, name):
            clock.watch(owner, name, phase)
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
    new = [one for one in compiled if not one[2]]
    print(f"{'to the first token':24}{total:8.2f} s")
    print(
        f"{len(compiled)} kernels, {len(new)} of them compiled, in {sum(one[0] for one in new):.1f} s of their threads"
    )
    for seconds, name, _ in sorted(new, reverse=True) if given.kernels else ():
        print(f"  {seconds:6.2f} s  {name}")


if __name__ == "__main__":
    main()
