"""A dry run: steps run without launching kernels, and the kernels that they would launch are compiled in parallel.

Triton compiles a kernel at its first launch, and the launch waits. So the first steps compile one kernel after the other. No
list names the kernels of a step: they depend on the model, on sizes, and on the layout of tensors in memory. But they do not
depend on the values that a step computes.

Here each launch becomes a warm-up, as `JITFunction.warmup` makes it, and Triton's cache hook receives the variants that are not
compiled. Threads compile them: the compiler releases Python's lock for most of its work.
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
from triton.runtime.cache import triton_key
from triton.runtime.jit import JITFunction

from folovllm.distributed.cores import num_cores
from folovllm.kernels.carveout import divide_memory

MOST_THREADS = 16
_turn = threading.Lock()  # launches and the hook are Triton's for all threads
# Triton (until 3.6) imports the launcher of every signature as one module, `__triton_launcher`. Two threads that import at once
# can get each other's.
_loading = threading.Lock()


@contextmanager
def dry_run(device: torch.device, num_processes: int = 1, show_progress: bool = False) -> Iterator[None]:
    """A context in which this thread launches no kernel. The kernels that it requests are compiled and loaded at its end.

    The outputs of kernels are zero, so no result is of use. Kernels that are compiled before Ctrl-C are in Triton's cache for
    the next start.

    Args:
        device: where the kernels are loaded.
        num_processes: number of processes that share this machine's cores.

    Raises:
        Exception: the first error of the compiler or of loading.
    """
    num_threads = max(1, min(MOST_THREADS, num_cores() // num_processes))
    set_device = partial(torch.cuda.set_device, device) if device.type == "cuda" else None
    pool = ThreadPoolExecutor(num_threads, "compile", set_device)
    try:
        with _turn:
            with compiled_in(pool) as requests, Zeros():
                yield
            done, total = as_completed(requests), len(requests)
            hidden = None if show_progress else True
            for future in tqdm(done, "Compiling kernels", total, unit="kernel", disable=hidden, delay=1):
                future.result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


@contextmanager
def compiled_in(pool: ThreadPoolExecutor) -> Iterator[list[Future[None]]]:
    """A context in which launches of this thread only request a kernel, which `pool` compiles. Returns the requests."""
    thread, launch, hook = threading.get_ident(), JITFunction.run, knobs.runtime.jit_cache_hook
    # Names in Triton's cache begin with a hash of Triton itself, 460 MB. One thread computes it, and the others wait for it.
    name = pool.submit(triton_key)
    warm_up: Callable[[], Any] = list  # of the current launch
    requests: list[Future[None]] = []
    requested: set[tuple[Any, str]] = set()

    def run(kernel: Any, *args: Any, warmup: bool, **kwargs: Any) -> Any:
        nonlocal warm_up
        if threading.get_ident() != thread:
            with _loading:  # its first launch loads, too
                return launch(kernel, *args, warmup=warmup, **kwargs)
        warm_up = partial(launch, kernel, *args, warmup=True, **kwargs)
        return warm_up()

    def request(*, key: str, fn: Any, **_: Any) -> bool:
        if threading.get_ident() != thread:
            return False
        # The set hashes the kernel's source. Names in Triton's cache depend on the order of hashing, so only this thread hashes.
        if (fn.jit_function, key) not in requested:
            requested.add((fn.jit_function, key))
            requests.append(pool.submit(compile_and_load, warm_up, name))
        return True  # tells Triton not to compile the variant itself

    JITFunction.run, knobs.runtime.jit_cache_hook = run, request
    try:
        yield requests
    finally:
        JITFunction.run, knobs.runtime.jit_cache_hook = launch, hook


def compile_and_load(warm_up: Callable[[], Any], name: Future[str]) -> None:
    """Compile a kernel, or find it in Triton's cache, and do the other work of a first launch."""
    name.result()
    kernel = warm_up()
    with _loading:
        _ = kernel.run  # loads it
        divide_memory(kernel)


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
