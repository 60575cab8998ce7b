"""A pool of processes that compile kernels which are not in Triton's cache. Threads would wait for Python's lock."""

from __future__ import annotations

import hashlib
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError
from contextlib import suppress
from multiprocessing.connection import Pipe
from typing import Any

from triton import AsyncCompileMode, knobs
from triton.runtime.cache import get_cache_manager

from folovllm.distributed.children import import_path, python_command
from folovllm.kernels.compile_worker import Task

PACKAGE = "folovllm."
PAUSE = 1.0  # seconds between two checks of a process

logger = logging.getLogger("folovllm")


class CompilePool:
    """One process for each thread that compiles a kernel. It starts at the first kernel, so a start with a full cache needs none."""

    def __init__(self) -> None:
        self._of_thread = threading.local()
        self._all: list[Worker] = []
        self._lock = threading.Lock()
        self._closed = False

    def compile(self, task: Task) -> None:
        """Let this thread's process compile a kernel. If that fails, it returns, and the kernel is not in the cache.

        Raises:
            CancelledError: the pool was closed.
        """
        if not task.module.startswith(PACKAGE) or not sys.executable:
            return  # importing a foreign module could start an engine; a program that embeds Python may have no executable
        try:
            error = self._own().compile(task)
        except (EOFError, OSError) as gone:
            error = f"the process has ended: {gone!r}"
        if self._closed:
            raise CancelledError
        if error:
            logger.debug("%s is compiled in this process, since the pool failed: %s", task.name, error)

    def _own(self) -> Worker:
        """Return this thread's process. Start it at the first call."""
        with self._lock:
            if self._closed:
                raise CancelledError
            if not hasattr(self._of_thread, "worker"):
                self._of_thread.worker = Worker()
                self._all.append(self._of_thread.worker)
        worker: Worker = self._of_thread.worker
        return worker

    def close(self) -> None:
        """Kill all processes of the pool."""
        with self._lock:
            self._closed = True
        for worker in self._all:
            worker.kill()
        for worker in self._all:
            worker.wait()


class Worker:
    """The parent's handle of a process that compiles kernels, one after the other."""

    def __init__(self) -> None:
        self._connection, theirs = Pipe()
        with theirs:
            self._process = subprocess.Popen(
                python_command("folovllm.kernels.compile_worker", str(theirs.fileno())),
                env={**os.environ, "PYTHONPATH": import_path(), "TRITON_CACHE_DIR": knobs.cache.dir},
                pass_fds=[theirs.fileno()],
                process_group=0,  # a group of its own with the compilers that it starts
            )
        # Sending to a process that has ended must raise an error here, not end the program with SIGPIPE.
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGPIPE])

    def compile(self, task: Task) -> str:
        """Wait for a kernel. Returns the error, or "". Raises EOFError or OSError if the process has ended.

        The process is checked each PAUSE: its end of the connection stays open if a fork of this process has a copy.
        """
        self._connection.send(task)
        while not self._connection.poll(PAUSE):
            if self._process.poll() is not None:
                raise EOFError
        error: str = self._connection.recv()
        return error

    def kill(self) -> None:
        """Kill the process."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def wait(self) -> None:
        """Wait until the process has ended."""
        self._process.wait()


class InPool(AsyncCompileMode):  # type: ignore[misc]  # to mypy all of Triton is Any
    """A mode in which `workers` compile a kernel first, unless it is in Triton's cache.

    Triton calls `submit` to compile. Then this process compiles too. It finds the kernel in the cache, or it compiles the kernel
    itself and raises the compiler's error.
    """

    def __init__(self, workers: CompilePool, task: Task) -> None:
        super().__init__(None)
        self._workers = workers
        self._task = task

    def submit(self, key: str, compile_fn: Callable[[], Any], finalize_fn: Callable[[Any], None]) -> Any:
        """Return the compiled kernel."""
        name = f"{self._task.name[:150]}.json"  # as Triton's
        if not get_cache_manager(hashlib.sha256(key.encode()).hexdigest()).get_group(name):
            self._workers.compile(self._task)
        kernel = compile_fn()
        finalize_fn(kernel)
        return kernel
