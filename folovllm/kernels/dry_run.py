"""A rehearsal: steps run with no kernel launched, and the kernels that they ask for are compiled meanwhile, many at once.

Triton compiles a kernel when it is first launched, and the launch waits: the first steps compile one kernel after the other.
No list says ahead which kernels a step needs, for that depends on the model, on sizes, and on how tensors lie in memory. But
it does not depend on what a step computes.

`triton.AsyncCompileMode` is made for such a list. A launch within it waits as ever. After one error of the compiler (Triton
3.6 to 3.7) no such mode can be entered again. And what launches a kernel, a C compiler's work in Triton 3.6, it leaves out.
So here threads wait for one kernel each, and let another process compile it (`compile_pool`).
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

from folovllm.cores import num_cores
from folovllm.kernels.carveout import divide_memory
from folovllm.kernels.compile_pool import CompilePool, InPool
from folovllm.kernels.compile_worker import Task, hash_from_below

MOST_THREADS = 16
_turn = threading.Lock()  # a rehearsal changes what all threads use


@contextmanager
def dry_run(device: torch.device, num_processes: int = 1, show_progress: bool = False) -> Iterator[None]:
    """Within this, this thread launches no kernel. Those that it asks for are compiled, and are there at the end.

    What a kernel would have written is zero: nothing that is computed here is of use. Ctrl-C ends it at once, and what is
    compiled by then is in Triton's cache, where the next start finds it.

    Args:
        device: where the kernels are loaded.
        num_processes: how many share the cores that this one may use.

    Raises:
        Exception: the first that the compiler, or the loading, raised.
    """
    num_threads = max(1, min(MOST_THREADS, num_cores() // num_processes))
    pool, workers = ThreadPoolExecutor(num_threads, "compile", *initializer_for(device)), CompilePool()
    with _turn, tqdm(total=0, desc="Compiling kernels", unit="kernel", disable=not show_progress) as progress:
        asked = Asked(pool, workers, progress)
        try:
            with (
                replaced(JITFunction, "run", asked.instead_of(JITFunction.run)),
                replaced(knobs.runtime, "jit_cache_hook", asked.is_asked),
            ):
                with Zeros():
                    yield
                asked.wait()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            workers.close()
            asked.forget()


class Asked:
    """The kernels that launches of one thread, that which made this object, have asked for."""

    def __init__(self, pool: ThreadPoolExecutor, workers: CompilePool, progress: Any) -> None:
        self._pool = pool
        self._workers = workers
        self._progress = progress
        self._thread = threading.get_ident()
        self._compile: Callable[[], Any] | None = None  # of the launch that is asked for now
        self._futures: dict[tuple[Any, str], Future[None]] = {}
        self._triton_key = pool.submit(triton_key)

    def instead_of(self, launch: Callable[..., Any]) -> Callable[..., Any]:
        """What this thread does when it should launch. Other threads launch as ever."""

        def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
            if threading.get_ident() != self._thread:
                return launch(kernel, *args, grid=grid, warmup=warmup, **kwargs)
            self._compile = partial(launch, kernel, *args, grid=grid, warmup=True, **kwargs)
            return self._compile()

        return run

    def is_asked(self, *, key: str, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        """Triton asks this before it compiles a variant. True says that it must not, for the pool does."""
        if threading.get_ident() != self._thread:
            return False
        hash_from_below(fn.jit_function)  # before anything else asks for its hash
        if (fn.jit_function, key) not in self._futures:
            assert self._compile is not None
            self._progress.total += 1
            self._futures[fn.jit_function, key] = future = self._pool.submit(
                self._compile_and_load, self._compile, fn, compile["specialization_data"]
            )
            future.add_done_callback(lambda _: self._progress.update())
        return True

    def _compile_and_load(self, compile_it: Callable[[], Any], fn: Any, specialization: str) -> None:
        """Compile a kernel, or find it in Triton's cache, and do all that its first launch would do.

        Names in that cache begin with a hash of Triton itself, 460 MB. One thread computes it and the others wait, lest
        each of them does.
        """
        target = driver.active.get_current_target()
        task = Task(fn.module, fn.name, specialization, target, self._triton_key.result())
        with InPool(self._workers, task):
            kernel = compile_it()
        _ = kernel.run  # loads it
        divide_memory(kernel)

    def wait(self) -> None:
        """Wait until all are compiled."""
        for future in as_completed(self._futures.values()):
            future.result()

    def forget(self) -> None:
        """Let go of the last launch's tensors now: futures know this object, so they would stay until Python looks for circles."""
        self._compile = None
        self._futures.clear()


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Within this, an attribute has another value."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def initializer_for(device: torch.device) -> tuple[Callable[..., None], tuple[torch.device]] | tuple[()]:
    """Let each thread of a pool have `device` as its current one."""
    return (torch.cuda.set_device, (device,)) if device.type == "cuda" else ()


class Zeros(TorchDispatchMode):
    """Within this, new memory is zero, so that ids, lengths and places that no kernel has written are in bounds."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: torch would import its compiler, which takes seconds, to tell it to leave this alone."""
        return False

    EMPTY = frozenset(
        getattr(torch.ops.aten, name)
        for name in ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
    )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Do the operation, and fill what it leaves empty."""
        out = func(*args, **(kwargs or {}))
        return out.zero_() if func.overloadpacket in self.EMPTY else out
