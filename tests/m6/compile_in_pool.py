"""Dry runs of launches of a kernel of the package, which other processes compile, with no GPU.

A program of its own, with the driver of `dry_run_kernels`: `python -m tests.m6.compile_in_pool` prints a JSON object of
what happened. With "end", it prints the number of a process that it has begun, and waits to be killed.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe
from pathlib import Path

from tests.m6.dry_run_kernels import CPU, copy, loaded, outcome, pretend_driver  # isort: skip -- nothing interprets

import torch
import triton

from folovllm.kernels import compile_pool
from folovllm.kernels.activation import act_and_mul_kernel, silu_and_mul
from folovllm.kernels.compile_worker import Task
from folovllm.kernels.dry_run import dry_run, replaced

compiled_here: list[str] = []
begun: list[int] = []  # processes


class NotedWorker(compile_pool.Worker):
    """Notes its process."""

    def __init__(self) -> None:
        super().__init__()
        begun.append(self._process.pid)


def pipe_with_copies() -> tuple[Connection, Connection]:
    """A pipe of whose ends a fork of this process has copies."""
    ends = Pipe()
    for end in ends:
        os.dup(end.fileno())
    return ends


def note_compiled(*, src: object, cache_hit: bool, **_: object) -> None:
    if not cache_hit:
        compiled_here.append(src.name)


def children() -> list[int]:
    """The processes that this one has begun and not waited for."""
    files = Path(f"/proc/{os.getpid()}/task").glob("*/children")
    return [int(pid) for file in files for pid in file.read_text().split()]


def run_dry(*widths: int) -> dict[str, object]:
    """Run launches dry, a variant for each width. Returns what happened meanwhile."""
    compiled_here.clear()
    begun.clear()
    loaded.clear()
    act_and_mul_kernel.device_caches.clear()  # as in a new process
    with dry_run(CPU):
        for width in widths:
            silu_and_mul(torch.zeros(1, 2 * width))
    return {"here": list(compiled_here), "begun": len(begun), "left": children(), "loaded": len(loaded)}


def at_first_process(act: Callable[[int], object]) -> threading.Thread:
    """Do something with the first process that is begun from now on."""
    known = len(begun)

    def wait_and_act() -> None:
        while len(begun) == known:
            time.sleep(0.001)
        act(begun[known])

    thread = threading.Thread(target=wait_and_act)
    thread.start()
    return thread


def main() -> dict[str, object]:
    """Run dry what is new, what is known, what is not of the package, and what fails or ends in several ways."""
    found: dict[str, object] = {"new": run_dry(16, 32), "known": run_dry(16, 32)}

    compiled_here.clear()
    found["not of the package"] = (outcome(lambda: copy(2)), list(compiled_here))

    begun.clear()
    thread = at_first_process(lambda pid: os.kill(pid, signal.SIGKILL))
    with replaced(compile_pool, "Pipe", pipe_with_copies), dry_run(CPU):
        silu_and_mul(torch.zeros(1, 128))
    thread.join()
    found["killed"] = {"here": compiled_here[1:], "left": children()}

    worker = NotedWorker()
    worker.kill()
    worker.wait()
    before = signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # it would end this program
    try:
        worker.compile(Task("folovllm", "", "", None, ""))
    except OSError as error:
        found["gone"] = type(error).__name__
    signal.signal(signal.SIGPIPE, before)

    with replaced(sys, "executable", None):
        found["no Python is known"] = run_dry(2048)

    zeros = torch.zeros(16)
    found["wrong"] = outcome(
        lambda: act_and_mul_kernel[(1,)](
            zeros, zeros, zeros, 6, 0.0, I=3, WIDTH=3, H=1, STREAM_WIDTH=1, SCALE=False, GELU=False
        )
    )

    thread = at_first_process(lambda pid: os.kill(os.getpid(), signal.SIGINT))
    found["interrupted"] = outcome(lambda: silu_and_mul(torch.zeros(1, 512)))
    thread.join()
    found["left"] = children()
    found["once more"] = run_dry(16, 1024)
    return found


def wait_for_the_end() -> None:
    """Be killed while another process compiles."""
    at_first_process(lambda pid: print(pid, flush=True))
    run_dry(*(16 * n for n in range(1, 30)))
    raise RuntimeError("nobody killed this process")


if __name__ == "__main__":
    pretend_driver()
    compile_pool.Worker = NotedWorker
    triton.knobs.compilation.listener = note_compiled
    if sys.argv[1:] == ["end"]:
        wait_for_the_end()
    print(json.dumps(main()))
