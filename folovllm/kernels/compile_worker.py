"""A process that compiles kernels for another one, whose Python has one lock for all its threads.

It begins in a third of a second, for it knows Triton and the kernels, and has only the shell of torch: the functions that are
compiled know no tensors. It needs no GPU either. What it makes it leaves in Triton's cache, where the other one finds it.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from multiprocessing.connection import Connection
from types import ModuleType, SimpleNamespace
from typing import Any

from folovllm.children import end_with_parent

WITHOUT = ("torch", "torch.distributed")  # of what the kernels' modules import


@dataclass(slots=True)
class Task:
    """A kernel to compile."""

    module: str
    name: str
    specialization: str  # Triton's record of a variant, JSON
    target: Any  # the GPU's kind
    triton_key: str  # a hash of Triton, which takes a while to compute


class TorchStub(ModuleType):
    """A module that has every name, and nothing behind it."""

    def __getattr__(self, name: str) -> TorchStub:
        if name.startswith("__"):
            raise AttributeError(name)
        return TorchStub(name)


def compile_it(task: Task) -> None:
    """Compile a kernel, and what launches it."""
    from triton.backends.nvidia import driver as nvidia
    from triton.runtime import cache, driver

    cache.triton_key = lambda: task.triton_key
    driver.set_active(SimpleNamespace(get_current_target=lambda: task.target, get_current_device=lambda: 0))
    function = getattr(import_module(task.module), task.name)
    hash_from_below(function)
    kernel = function.preload(task.specialization)
    if hasattr(nvidia, "make_launcher"):  # C, which Triton 3.6 writes and lets a compiler translate
        nvidia.CudaLauncher(kernel.src, kernel.metadata)


def hash_from_below(function: Any, above: tuple[Any, ...] = ()) -> None:
    """Let Triton hash the source of a kernel, after those of the functions that it calls, unless it has.

    Names in its cache depend on these hashes, and a hash (Triton 3.6 to 3.7) on which of those it has made before.
    """
    from triton.runtime.jit import JITCallable

    if function.hash is not None:
        return
    for name in function.fn.__code__.co_names:
        called = function.__globals__.get(name)
        if isinstance(called, JITCallable) and called not in (*above, function):
            hash_from_below(called, (*above, function))
    _ = function.cache_key


def outcome(task: Task) -> str:
    """What went wrong, if anything did. The other process will compile such a kernel itself, and see."""
    try:
        compile_it(task)
    except Exception:
        return traceback.format_exc()
    return ""


def main() -> None:
    """Compile what comes through the descriptor that the command line names, until its other end is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent to answer
    fd = int(sys.argv[1])
    threading.Thread(target=end_with_parent, args=[fd], daemon=True).start()
    sys.modules.update({name: TorchStub(name) for name in WITHOUT})
    os.dup2(2, 1)  # what is printed here is no program's output
    with Connection(fd) as connection, suppress(EOFError, ConnectionError):  # the other end is closed
        while True:
            connection.send(outcome(connection.recv()))


if __name__ == "__main__":
    main()
