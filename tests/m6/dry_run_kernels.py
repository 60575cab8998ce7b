"""Dry runs of kernel launches with no GPU: Triton compiles for one, and a driver that stands in for CUDA's loads nothing.

A program of its own, because Triton decides when it is first imported whether it interprets. It prints a JSON object of
what happened: `python -m tests.m6.dry_run_kernels runs` compiles a kernel in this process, and has one of the package
compiled by others. `end` prints the number of a process that it has begun, and waits to be killed.
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
from types import SimpleNamespace

os.environ["TRITON_INTERPRET"] = "0"

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from folovllm.kernels import compile_pool
from folovllm.kernels.activation import act_and_mul_kernel, silu_and_mul
from folovllm.kernels.compile_worker import Task
from folovllm.kernels.dry_run import dry_run, replaced

CPU = torch.device("cpu")
launched: list[str] = []  # by which thread
loaded: list[str] = []  # names of kernels
compiled: list[str] = []  # likewise, in this process
begun: list[int] = []  # processes


@triton.jit
def copy_kernel(out_ptr, x_ptr, n, WIDTH: tl.constexpr):
    at = tl.arange(0, WIDTH)
    tl.store(out_ptr + at, tl.load(x_ptr + at, mask=at < n), mask=at < n)


@triton.jit
def wrong_kernel(out_ptr):
    tl.store(out_ptr, no_such_name)  # noqa: F821


class Launcher:
    """Notes a launch."""

    def __init__(self, *_):
        pass

    def __call__(self, *_):
        launched.append(threading.current_thread().name)


def load_binary(name, *_):
    loaded.append(name)
    return 1, 1, 0, 0, 1024


def pretend_driver() -> None:
    """Let Triton have a driver that stands in for CUDA's, and note what it compiles."""
    utils = SimpleNamespace(load_binary=load_binary, get_device_properties=lambda device: {"max_shared_mem": 1 << 20})
    driver.set_active(
        SimpleNamespace(
            get_current_target=lambda: GPUTarget("cuda", 90, 32), get_current_device=lambda: 0,
            get_current_stream=lambda device: 0, launcher_cls=Launcher, utils=utils,
        )
    )  # fmt: skip
    triton.knobs.compilation.listener = lambda *, src, cache_hit, **_: cache_hit or compiled.append(src.name)


def copy(n: int, width: int = 16) -> torch.Tensor:
    """Launch a kernel whose variant depends on whether n is 1, or a multiple of 16. The result is not initialised here."""
    out = torch.empty(width)
    copy_kernel[(1,)](out, torch.ones(width), n, WIDTH=width)
    return out


def outcome(body: Callable[[], object]) -> str:
    """The name of the exception that ends a dry run."""
    try:
        with dry_run(CPU):
            body()
    except BaseException as error:
        return type(error).__name__
    return ""


def here() -> dict[str, object]:
    """Run dry, and launch."""
    found: dict[str, object] = {}
    torch.full((16,), 7.0)  # leaves memory that is not zero
    with dry_run(CPU):
        results = [copy(n) for n in (1, 2, 3, 16, 2)]
        other = threading.Thread(target=copy, args=[2, 32], name="other")
        other.start()
        other.join()
    found["written"] = sum(int(out.count_nonzero()) for out in results)
    found["launched in the dry run"] = list(launched)
    found["loaded"], found["compiled in the dry run"] = len(loaded), len(compiled)
    launched.clear()
    compiled.clear()
    for n in (1, 2, 3, 16):
        copy(n)
    found["launched"], found["compiled later"] = len(launched), len(compiled)
    found["wrong here"] = outcome(lambda: wrong_kernel[(1,)](torch.empty(1)))
    return found


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


def children() -> list[int]:
    """The processes that this one has begun and not waited for."""
    files = Path(f"/proc/{os.getpid()}/task").glob("*/children")
    return [int(pid) for file in files for pid in file.read_text().split()]


def run_dry(*widths: int) -> dict[str, object]:
    """Run launches dry, a variant for each width; what happened meanwhile."""
    for noted in (compiled, begun, loaded):
        noted.clear()
    act_and_mul_kernel.device_caches.clear()  # as in a new process
    with dry_run(CPU):
        for width in widths:
            silu_and_mul(torch.zeros(1, 2 * width))
    return {"here": list(compiled), "begun": len(begun), "left": children(), "loaded": len(loaded)}


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


def pool() -> dict[str, object]:
    """Run dry what is new, what is known, what is not of the package, and what fails or ends in several ways."""
    found: dict[str, object] = {"new": run_dry(16, 32), "known": run_dry(16, 32)}

    compiled.clear()
    found["not of the package"] = (outcome(lambda: copy(2, 64)), list(compiled))

    begun.clear()
    thread = at_first_process(lambda pid: os.kill(pid, signal.SIGKILL))
    with replaced(compile_pool, "Pipe", pipe_with_copies), dry_run(CPU):
        silu_and_mul(torch.zeros(1, 128))
    thread.join()
    found["killed"] = {"here": compiled[1:], "left": children()}

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

    x, shape = torch.zeros(16), {"I": 3, "WIDTH": 3, "H": 1, "STREAM_WIDTH": 1}  # 3 is no power of two
    found["wrong"] = outcome(lambda: act_and_mul_kernel[(1,)](x, x, x, 6, 0.0, **shape, SCALE=False, GELU=False))

    thread = at_first_process(lambda pid: os.kill(os.getpid(), signal.SIGINT))
    found["interrupted"] = outcome(lambda: silu_and_mul(torch.zeros(1, 512)))
    thread.join()
    found["left"] = children()
    found["once more"] = run_dry(16, 1024)
    return found


def runs() -> dict[str, object]:
    """Both."""
    untouched = triton.runtime.JITFunction.run
    found = here() | pool()
    found["as before"] = triton.runtime.JITFunction.run is untouched and not triton.knobs.runtime.jit_cache_hook
    return found


def end() -> dict[str, object]:
    """Be killed while another process compiles."""
    at_first_process(lambda pid: print(pid, flush=True))
    run_dry(*(16 * n for n in range(1, 30)))
    raise RuntimeError("nobody killed this process")


if __name__ == "__main__":
    pretend_driver()
    compile_pool.Worker = NotedWorker
    print(json.dumps({"runs": runs, "end": end}[sys.argv[1]]()))
