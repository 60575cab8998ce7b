"""Dry runs of kernel launches with no GPU: Triton compiles for one, and a driver that stands in for CUDA's loads nothing.

A program of its own, because Triton decides when it is first imported whether it interprets. It prints a JSON object of
what happened.
"""

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import ClassVar

os.environ["TRITON_INTERPRET"] = "0"

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from folovllm.kernels.dry_run import dry_run

CPU = torch.device("cpu")
launched: list[str] = []  # by which thread
loaded: list[str] = []  # names of kernels
compiled: list[str] = []  # likewise


@triton.jit
def copy_kernel(out_ptr, x_ptr, n, WIDTH: tl.constexpr):
    at = tl.arange(0, WIDTH)
    tl.store(out_ptr + at, tl.load(x_ptr + at, mask=at < n), mask=at < n)


@triton.jit
def wrong_kernel(out_ptr):
    tl.store(out_ptr, no_such_name)  # noqa: F821


class Launcher:
    """Notes a launch, and how many are made at once."""

    being_made: ClassVar[set[object]] = set()
    most: ClassVar[int] = 0

    def __init__(self, *_):
        self.being_made.add(self)
        Launcher.most = max(self.most, len(self.being_made))
        time.sleep(0.3)  # another thread's turn
        self.being_made.remove(self)

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
    found["launchers made at once"] = Launcher.most
    launched.clear()
    compiled.clear()
    for n in (1, 2, 3, 16):
        copy(n)
    found["launched"], found["compiled later"] = len(launched), len(compiled)
    launched.clear()
    found["known"] = outcome(lambda: copy(2))
    found["launched again"] = len(launched)
    found["wrong here"] = outcome(lambda: wrong_kernel[(1,)](torch.empty(1)))
    return found


def interrupted() -> str:
    """The name of the exception that ends a dry run which is interrupted after its first launch."""

    def body() -> None:
        copy(2, 128)
        signal.raise_signal(signal.SIGINT)

    return outcome(body)


if __name__ == "__main__":
    pretend_driver()
    untouched = triton.runtime.JITFunction.run
    found = here() | {"interrupted": interrupted(), "once more": outcome(lambda: copy(2, 256))}
    found["as before"] = triton.runtime.JITFunction.run is untouched and not triton.knobs.runtime.jit_cache_hook
    print(json.dumps(found))
