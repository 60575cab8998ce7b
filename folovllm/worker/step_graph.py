"""A recorded piece of device work that is started as one: a CUDA graph, or on CPU something that behaves like one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

POISON = -(2**30)


class StepGraph(Protocol):
    """Record once, replay often. A replay reads and writes the very memory that was used while recording."""

    static_input: torch.Tensor

    def capture(self, run: Callable[[torch.Tensor], None]) -> None:
        """Record `run(static_input)`."""

    def replay(self, value: torch.Tensor) -> None:
        """Copy `value` into the static input and do the recorded work again."""


class CudaGraph:
    """A CUDA graph: the launches of a whole step for the price of one."""

    def __init__(self, static_input: torch.Tensor, pool: Any, stream: torch.cuda.Stream, is_rehearsed: bool) -> None:
        """Graphs of one `pool` and one `stream` share their memory. torch's own stream is on the GPU that records first.

        `is_rehearsed`: what `run` compiles, loads or sets to zero at its first call is there.
        """
        self.static_input = static_input
        self._graph = torch.cuda.CUDAGraph()
        self._pool = pool
        self._stream = stream
        self._is_rehearsed = is_rehearsed

    def capture(self, run: Callable[[torch.Tensor], None]) -> None:
        """Record `run(static_input)`. Unless it is rehearsed it runs once before.

        A kernel that was missed is loaded all the same: "relaxed" allows that while something is recorded.
        """
        if not self._is_rehearsed:
            run(self.static_input)
            torch.cuda.synchronize()
        with torch.cuda.graph(self._graph, pool=self._pool, stream=self._stream, capture_error_mode="relaxed"):
            run(self.static_input)

    def replay(self, value: torch.Tensor) -> None:
        """Copy the new input over the old one and start the graph; both are queued on the current stream."""
        self.static_input.copy_(value, non_blocking=True)
        self._graph.replay()


class RecordedGraph:
    """The same on CPU, to test and to teach without a GPU: it calls `run` again, over the same static input.

    Like a real graph it knows nothing but that memory. To make a forgotten copy show, the input is poisoned as soon as
    a replay is over: a replay that does not bring all of its input computes nonsense.
    """

    def __init__(self, static_input: torch.Tensor) -> None:
        self.static_input = static_input
        self._run: Callable[[torch.Tensor], None] | None = None

    def capture(self, run: Callable[[torch.Tensor], None]) -> None:
        """Run `run(static_input)` once and remember it; then poison the input.

        Recording works on made-up input; what it leaves behind must not be read.
        """
        run(self.static_input)
        self._run = run
        self.static_input.fill_(POISON)

    def replay(self, value: torch.Tensor) -> None:
        """Copy `value` into the static input, run again, poison the input. Raises RuntimeError before a capture."""
        if self._run is None:
            raise RuntimeError("nothing was captured: call capture first")
        self.static_input.copy_(value)
        self._run(self.static_input)
        self.static_input.fill_(POISON)


class Recorder:
    """Records graphs one after the other: on a GPU all in one pool of memory, for they never run at the same time."""

    def __init__(self, device: torch.device, is_rehearsed: bool = False) -> None:
        """`is_rehearsed`: as `CudaGraph`, of all that will be recorded."""
        self._device = device
        self._shared: tuple[Any, torch.cuda.Stream, bool] | None = None
        if device.type == "cuda":
            self._shared = torch.cuda.graph_pool_handle(), torch.cuda.Stream(device), is_rehearsed

    def record(
        self, padding: npt.NDArray[np.int32], work: Callable[[torch.Tensor], None], from_host: bool = False
    ) -> StepGraph:
        """Record `work` on an input like `padding`, with which it runs now, and must leave no trace.

        `from_host`: the input lies in host memory, and `work` begins by copying it. So a replay is a single launch, and the
        one before must be over by then.
        """
        on_host = torch.from_numpy(padding)
        static_input = on_host.to(self._device) if not from_host or self._shared is None else on_host.pin_memory()
        graph = RecordedGraph(static_input) if self._shared is None else CudaGraph(static_input, *self._shared)
        with torch.inference_mode():
            graph.capture(work)
        return graph
