"""A process that compiles kernels for another one, so that its threads do not wait for Python's lock.

It starts in a third of a second, because it imports Triton and the kernels, but only a stub of torch: the compiled functions use
no tensors. It needs no GPU. It writes the compiled kernels to Triton's cache, where the other process finds them.
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

from folovllm.distributed.children import end_with_parent

WITHOUT = ("torch", "torch.distributed")  # imports of the kernels' modules that are stubs here


@dataclass(slots=True)
class Task:
    """A kernel to compile."""

    module: str
    name: str
    specialization: str  # Triton's description of a variant, JSON
    target: Any  # Triton's description of the GPU
    triton_key: str  # the hash of Triton, which is slow to compute


class TorchStub(ModuleType):
    """A stub of a module: every attribute exists, and is another stub."""

    def __getattr__(self, name: str) -> TorchStub:
        if name.startswith("__"):
            raise AttributeError(name)
        return TorchStub(name)


def compile_it(task: Task) -> None:
    """Compile a kernel and its launcher."""
    from triton.backends.nvidia import driver as nvidia
    from triton.runtime import cache, driver

    cache.triton_key = lambda: task.triton_key
    driver.set_active(SimpleNamespace(get_current_target=lambda: task.target, get_current_device=lambda: 0))
    function = getattr(import_module(task.module), task.name)
    hash_from_below(function)
    kernel = function.preload(task.specialization)
    if hasattr(nvidia, "make_launcher"):  # Triton 3.6 generates C code for it, and calls a compiler
        nvidia.CudaLauncher(kernel.src, kernel.metadata)


def hash_from_below(function: Any, above: tuple[Any, ...] = ()) -> None:
    """Make Triton hash the source of a kernel, after the sources of the functions that it calls.

    Names in Triton's cache depend on these hashes, and the hashes depend on the order of hashing (Triton 3.6 to 3.7).
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
    """Compile a kernel. Returns the error, or "". On an error the other process compiles the kernel itself, and raises the error."""
    try:
        compile_it(task)
    except Exception:
        return traceback.format_exc()
    return ""


def main() -> None:
    """Compile the kernels that arrive through the file descriptor of the command line, until its other end is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    fd = int(sys.argv[1])
    threading.Thread(target=end_with_parent, args=[fd], daemon=True).start()
    sys.modules.update({name: TorchStub(name) for name in WITHOUT})
    os.dup2(2, 1)  # prints go to stderr, not into the output of the user's program
    with Connection(fd) as connection, suppress(EOFError, ConnectionError):  # the other end is closed
        while True:
            connection.send(outcome(connection.recv()))


if __name__ == "__main__":
    main()
