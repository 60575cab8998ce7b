"""A dry run: steps run without launching kernels, and the kernels that they would launch are compiled in parallel.

Triton compiles a kernel at its first launch, and the launch waits. So the first steps compile one kernel after the other. No
list names the kernels of a step: they depend on the model, on sizes, and on the layout of tensors in memory. But they do not
depend on the values that a step computes.

`triton.AsyncCompileMode` alone is not enough. A launch within it still waits, it cannot be entered again after a compiler error
(Triton 3.6 to 3.7), and it does not compile the launcher, which is C code in Triton 3.6. So here each thread waits for one
kernel, which another process compiles (`compile_pool`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from tqdm import tqdm
from triton import knobs
from triton.runtime import driver
from triton.runtime.cache import triton_key
from triton.runtime.jit import JITFunction

from folovllm.distributed.cores import num_cores
from folovllm.kernels.carveout import divide_memory
from folovllm.kernels.compile_pool import CompilePool, InPool
from folovllm.kernels.compile_worker import Task, hash_from_below

MOST_THREADS = 16
_turn = threading.Lock()  # a dry run patches Triton for all threads


@contextmanager
def dry_run(device: torch.device, num_processes: int = 1, show_progress: bool = False) -> Iterator[None]:
    """A context in which this thread launches no kernel. The kernels that it requests are compiled and loaded at its end.

    The outputs of kernels are zero, so no result is of use. Ctrl-C ends the dry run at once. Kernels that are compiled by then
    are in Triton's cache for the next start.

    Args:
        device: where the kernels are loaded.
        num_processes: number of processes that share this machine's cores.

    Raises:
        Exception: the first error of the compiler or of loading.
    """
    num_threads = max(1, min(MOST_THREADS, num_cores() // num_processes))
    pool, workers = ThreadPoolExecutor(num_threads, "compile", *initializer_for(device)), CompilePool()
    with _turn, tqdm(total=0, desc="Compiling kernels", unit="kernel", disable=not show_progress) as progress:
        requests = CompileRequests(pool, workers, progress)
        try:
            with (
                replaced(JITFunction, "run", requests.instead_of(JITFunction.run)),
                replaced(knobs.runtime, "jit_cache_hook", requests.add),
            ):
                with Zeros():
                    yield
                requests.wait()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            workers.close()
            requests.forget()


class CompileRequests:
    """The kernels that launches of one thread have requested. It is the thread that made this object."""

    def __init__(self, pool: ThreadPoolExecutor, workers: CompilePool, progress: Any) -> None:
        self._pool = pool
        self._workers = workers
        self._progress = progress
        self._thread = threading.get_ident()
        self._compile: Callable[[], Any] | None = None  # compiles the kernel of the current launch
        self._futures: dict[tuple[Any, str], Future[None]] = {}
        self._triton_key = pool.submit(triton_key)

    def instead_of(self, launch: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function that replaces `launch`: in this thread it only requests the compilation, in all others it launches."""

        def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
            if threading.get_ident() != self._thread:
                return launch(kernel, *args, grid=grid, warmup=warmup, **kwargs)
            self._compile = partial(launch, kernel, *args, grid=grid, warmup=True, **kwargs)
            return self._compile()

        return run

    def add(self, *, key: str, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        """Queue the compilation of a variant. Triton calls this hook first; True tells it not to compile the variant itself."""
        if threading.get_ident() != self._thread:
            return False
        hash_from_below(fn.jit_function)  # before any other code computes its hash
        if (fn.jit_function, key) not in self._futures:
            assert self._compile is not None
            self._progress.total += 1
            self._futures[fn.jit_function, key] = future = self._pool.submit(
                self._compile_and_load, self._compile, fn, compile["specialization_data"]
            )
            future.add_done_callback(lambda _: self._progress.update())
        return True

    def _compile_and_load(self, compile_it: Callable[[], Any], fn: Any, specialization: str) -> None:
        """Compile a kernel, or find it in Triton's cache, and do the other work of a first launch.

        Names in that cache begin with a hash of Triton itself, 460 MB. One thread computes it, and the others wait for it.
        """
        target = driver.active.get_current_target()
        task = Task(fn.module, fn.name, specialization, target, self._triton_key.result())
        with InPool(self._workers, task):
            kernel = compile_it()
        _ = kernel.run  # loads it
        divide_memory(kernel)

    def wait(self) -> None:
        """Wait until all requested kernels are compiled."""
        for future in as_completed(self._futures.values()):
            future.result()

    def forget(self) -> None:
        """Drop the tensors of the last launch now. Futures refer to this object, so only the garbage collector would free them."""
        self._compile = None
        self._futures.clear()


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """A context in which an attribute has another value."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def initializer_for(device: torch.device) -> tuple[Callable[..., None], tuple[torch.device]] | tuple[()]:
    """Return the initializer of a thread pool that makes `device` the current device of each thread."""
    return (torch.cuda.set_device, (device,)) if device.type == "cuda" else ()


class Zeros(TorchDispatchMode):
    """A mode in which new memory is zero. So ids, lengths and indices that no kernel has written are in bounds."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False. True would make torch import its compiler, which takes seconds."""
        return False

    EMPTY = frozenset(
        getattr(torch.ops.aten, name)
        for name in ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
    )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, and set its result to zero if it is uninitialized."""
        out = func(*args, **(kwargs or {}))
        return out.zero_() if func.overloadpacket in self.EMPTY else out
