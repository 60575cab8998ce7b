"""Kernels that Triton's cache lacks are compiled in other processes: threads would take turns in Python's lock."""

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

from folovllm.children import import_path, python_command
from folovllm.kernels.compile_worker import Task

PACKAGE = "folovllm."
PAUSE = 1.0  # seconds between two checks of a process

logger = logging.getLogger("folovllm")


class CompilePool:
    """A process for each thread that has a kernel to compile. Begun when it is first needed, so a start that finds all
    its kernels begins none.
    """

    def __init__(self) -> None:
        self._of_thread = threading.local()
        self._all: list[Worker] = []
        self._lock = threading.Lock()
        self._closed = False

    def compile(self, task: Task) -> None:
        """Let this thread's process compile a kernel. Nothing is said if it cannot, or is gone: then it is not in the cache.

        Raises:
            CancelledError: nobody waits for it any more.
        """
        if not task.module.startswith(PACKAGE) or not sys.executable:
            return  # to import another's module might start an engine; and a program that embeds Python may not know one
        try:
            error = self._own().compile(task)
        except (EOFError, OSError) as gone:
            error = f"the process is gone: {gone!r}"
        if self._closed:
            raise CancelledError
        if error:
            logger.debug("%s is compiled here, for elsewhere: %s", task.name, error)

    def _own(self) -> Worker:
        """This thread's process, new or not."""
        with self._lock:
            if self._closed:
                raise CancelledError
            if not hasattr(self._of_thread, "worker"):
                self._of_thread.worker = Worker()
                self._all.append(self._of_thread.worker)
        worker: Worker = self._of_thread.worker
        return worker

    def close(self) -> None:
        """End all of them, whatever they are doing."""
        with self._lock:
            self._closed = True
        for worker in self._all:
            worker.kill()
        for worker in self._all:
            worker.wait()


class Worker:
    """A process that compiles kernels, one after the other, as its parent sees it."""

    def __init__(self) -> None:
        self._connection, theirs = Pipe()
        with theirs:
            self._process = subprocess.Popen(
                python_command("folovllm.kernels.compile_worker", str(theirs.fileno())),
                env={**os.environ, "PYTHONPATH": import_path(), "TRITON_CACHE_DIR": knobs.cache.dir},
                pass_fds=[theirs.fileno()],
                process_group=0,  # with the compilers that it starts
            )
        # This thread sends to a process that may be gone: an error, even in a program that such a signal ends.
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGPIPE])

    def compile(self, task: Task) -> str:
        """Wait for a kernel. Returns what went wrong. Raises EOFError or OSError if the process is gone.

        Its end of the connection is closed then, unless a fork of this process has a copy.
        """
        self._connection.send(task)
        while not self._connection.poll(PAUSE):
            if self._process.poll() is not None:
                raise EOFError
        error: str = self._connection.recv()
        return error

    def kill(self) -> None:
        """End it now."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def wait(self) -> None:
        """Wait until it has ended."""
        self._process.wait()


class InPool(AsyncCompileMode):  # type: ignore[misc]  # to mypy all of Triton is Any
    """Within this, a thread lets `workers` compile a kernel first, unless Triton's cache has it.

    Triton asks such a mode to compile. It then does so here all the same, and finds the kernel in its cache; or not, and
    what is wrong with it is raised here.
    """

    def __init__(self, workers: CompilePool, task: Task) -> None:
        super().__init__(None)
        self._workers = workers
        self._task = task

    def submit(self, key: str, compile_fn: Callable[[], Any], finalize_fn: Callable[[Any], None]) -> Any:
        """Return the kernel."""
        name = f"{self._task.name[:150]}.json"  # as Triton's
        if not get_cache_manager(hashlib.sha256(key.encode()).hexdigest()).get_group(name):
            self._workers.compile(self._task)
        kernel = compile_fn()
        finalize_fn(kernel)
        return kernel
