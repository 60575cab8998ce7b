"""Seconds from the start of a process to its first token, by phase; with nothing kept, and with what earlier starts left.

    python tools/measure_start.py                                   Qwen3-0.6B's geometry: a checkpoint of random weights is written and read
    python tools/measure_start.py --geometry qwen3-4b               another one
    python tools/measure_start.py --model stories-5m                a model that is there

Four processes, one after the other, each with a column of the table. The first one finds no compiled kernel, no byte code of Python's sources, and the weights on the
disk. Then kernels are kept and weights are in memory, which are warm starts on a machine that keeps no byte code; and the last two may write and read it.
A phase within another one counts as its own: what is imported while the model is built is imported. A thread's work counts where it is waited for.
"""

from __future__ import annotations

import argparse
import importlib.machinery
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

PHASES = {  # of functions, in order
    "set_up": "configuration",
    "load_tokenizer": "tokenizer",
    "load_model": "read the weights",
    "compile_at_once": "compile kernels",
    "fit_kv_cache": "profile the memory",
    "capture_cudagraph": "capture graphs",
}
PACKAGES = "torch", "triton", "folovllm", "transformers"
STARTS = "nothing kept", "kernels kept", "byte code written", "all kept"
FIRST = [f"import {name}" for name in (*PACKAGES, "all else")]
ORDER = ["Python", *FIRST, "CUDA", *PHASES.values(), "first token", "the rest"]


class Clock:
    """Seconds of the main thread since the process started, by phase."""

    def __init__(self) -> None:
        ticks = int(Path("/proc/self/stat").read_text(encoding="ascii").rpartition(")")[2].split()[19])
        self._born = ticks / os.sysconf("SC_CLK_TCK")
        self._last = 0.0
        self._open = ["Python"]  # phases, each within the one before
        self.phases: Counter[str] = Counter()

    def now(self) -> float:
        """Seconds since the process started."""
        return time.clock_gettime(time.CLOCK_BOOTTIME) - self._born

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A phase within the present one."""
        self._lap()
        self._open.append(name)
        try:
            yield
        finally:
            self._lap()
            self._open.pop()

    def watch(self, owner: Any, name: str, phase: Callable[..., str]) -> None:
        """Let the calls of a method on the main thread be phases; a function of the last argument tells which."""
        method: Callable[..., Any] = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            is_main = threading.current_thread() is threading.main_thread()
            with self.phase(phase(*args[-1:])) if is_main else nullcontext():
                return method(*args, **kwargs)

        setattr(owner, name, timed)

    def _lap(self) -> None:
        """Count the time since the last lap as the innermost open phase's."""
        now = self.now()
        self.phases[self._open[-1]] += now - self._last
        self._last = now


def package(module: Any) -> str:
    """The phase in which a module is imported."""
    name = module.__name__.partition(".")[0]
    return f"import {name if name in PACKAGES else 'all else'}"


def start(model: str) -> None:
    """Start an engine, write a token, and print a line of JSON."""
    clock, compiled = Clock(), list[float]()  # seconds of each kernel that Triton looked for: 0 if it was found
    with clock.phase("the rest"):
        clock.watch(importlib.machinery.SourceFileLoader, "exec_module", package)
        import torch
        from triton import knobs

        clock.watch(torch.cuda, "_lazy_init", lambda *_: "CUDA")

        from folovllm import LLM, SamplingParams
        from folovllm.config import DEFAULT_MODEL
        from folovllm.engine import llm_engine
        from folovllm.worker.graph_runner import GraphRunner
        from folovllm.worker.model_runner import ModelRunner

        owners = dict.fromkeys(PHASES, GraphRunner) | {"fit_kv_cache": ModelRunner}
        owners |= dict.fromkeys(("set_up", "load_tokenizer"), llm_engine)
        for name, phase in PHASES.items():
            clock.watch(owners[name], name, lambda *_, phase=phase: phase)

        def count(*, times: Any, cache_hit: bool, **_: Any) -> None:
            compiled.append(0.0 if cache_hit else times.total / 1e6)

        knobs.compilation.listener = count
        with LLM(model, tokenizer=DEFAULT_MODEL, model_impl="native", use_tqdm=False) as llm:
            with clock.phase("first token"):
                llm.generate([list(range(100))], SamplingParams(max_tokens=1), use_tqdm=False)
            phases, total = dict(clock.phases), clock.now()  # the engine's end is no part of its start
    counters = dict(line.split(": ") for line in Path("/proc/self/io").read_text(encoding="ascii").splitlines())
    figures = {
        "to the first token": total,
        "GB from the disk": int(counters["read_bytes"]) / 1e9,
        "modules": len(sys.modules),
        "kernels": len(compiled),
        "kernels compiled": sum(map(bool, compiled)),
        "threads waited for them": sum(compiled),
    }
    print(json.dumps({phase: phases.get(phase, 0.0) for phase in ORDER} | figures))


def write(geometry: str, folder: Path) -> str:
    """Write a checkpoint of random weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from folovllm.apps.bench.contenders import GEOMETRIES

    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**GEOMETRIES[geometry]), dtype=torch.bfloat16)
    model.save_pretrained(folder)
    del model
    torch.cuda.empty_cache()  # for the starts
    return str(folder)


def main() -> None:
    """Start four times, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--geometry", default="qwen3-0.6b")
    parser.add_argument("--model", help="in place of random weights")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        start(given.model)
        return
    results = []
    with tempfile.TemporaryDirectory() as folder:
        model = given.model or write(given.geometry, Path(folder, given.geometry))
        for file in Path(model).glob("*.safetensors"):
            with file.open("rb") as opened:  # the system drops them from memory
                os.fsync(opened.fileno())
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        kept = {"TRITON_CACHE_DIR": f"{folder}/kernels", "PYTHONPYCACHEPREFIX": f"{folder}/byte code"}
        for name in STARTS:
            env = os.environ | kept | {"PYTHONDONTWRITEBYTECODE": "1" if "kept" in name else ""}
            child = [sys.executable, __file__, "--child", "--model", model]
            output = subprocess.run(child, env=env, stdout=subprocess.PIPE, text=True, check=True).stdout
            results.append(json.loads(output.splitlines()[-1]))
    print(f"{'seconds':24}" + "".join(f"{name:>20}" for name in STARTS))
    for name in results[0]:
        cells = (f"{result[name]:.2f}" if isinstance(result[name], float) else result[name] for result in results)
        print(f"{name:24}" + "".join(f"{cell:>20}" for cell in cells))


if __name__ == "__main__":
    main()
