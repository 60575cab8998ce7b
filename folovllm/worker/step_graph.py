"""A recorded piece of device work that is started as one, which recordings are kept, and the host memory that feeds them.

It is a CUDA graph, or on CPU something that behaves like one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

POISON = -(2**30)
SLOTS = 8  # of a `HostRing`


class StepGraph(Protocol):
    """Record once, replay often. A replay reads and writes the very memory that was used while recording."""

    static_input: torch.Tensor

    def capture(self, run: Callable[[torch.Tensor], None]) -> None:
        """Record `run(static_input)`."""

    def replay(self, value: torch.Tensor) -> None:
        """Copy `value` into the static input and do the recorded work again."""


class CudaGraph:
    """A CUDA graph: the launches of a whole step for the price of one."""

    def __init__(self, static_input: torch.Tensor, pool: Any, stream: torch.cuda.Stream, had_dry_run: bool) -> None:
        """Graphs of one `pool` and one `stream` share their memory. torch's own stream is on the GPU that records first.

        `had_dry_run`: what `run` compiles, loads or sets to zero at its first call is there.
        """
        self.static_input = static_input
        self._graph = torch.cuda.CUDAGraph()
        self._pool = pool
        self._stream = stream
        self._had_dry_run = had_dry_run

    def capture(self, run: Callable[[torch.Tensor], None]) -> None:
        """Record `run(static_input)`. Unless its kernels were compiled by a dry run, it runs once before.

        A kernel that was missed is loaded all the same: "relaxed" allows that while something is recorded.
        """
        if not self._had_dry_run:
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

    def __init__(self, device: torch.device, had_dry_run: bool = False) -> None:
        """`had_dry_run`: as `CudaGraph`, of all that will be recorded."""
        self._device = device
        self._shared: tuple[Any, torch.cuda.Stream, bool] | None = None
        if device.type == "cuda":
            self._shared = torch.cuda.graph_pool_handle(), torch.cuda.Stream(device), had_dry_run

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


class GraphStore(ABC):
    """Keeps captured decode steps.

    A graph serves steps of one width, its number of rows. A step of fewer rows is padded to the smallest width that holds
    it. At one width there are several kinds of work (the whole step, its logits, its sample), each with a graph of its own.
    """

    widths: list[int]  # ascending, the last one `max_num_seqs`; the driver pads to them, so they stay as they are

    @abstractmethod
    def __init__(self, max_num_seqs: int) -> None:
        """Choose `widths` for batches of 1 to `max_num_seqs` sequences."""

    @abstractmethod
    def get(self, width: int, kind: str, record: Callable[[], StepGraph]) -> StepGraph:
        """The graph of `width` and `kind`. `record()` makes one, which takes time and memory."""

    @abstractmethod
    def __len__(self) -> int:
        """How many graphs are kept now."""


class AllGraphs(GraphStore):
    """Keeps every graph that was ever recorded."""

    def __init__(self, max_num_seqs: int) -> None:
        self.widths = decode_buckets(max_num_seqs)
        self._graphs: dict[tuple[int, str], StepGraph] = {}

    def get(self, width: int, kind: str, record: Callable[[], StepGraph]) -> StepGraph:
        """Record once, and never forget."""
        if (width, kind) not in self._graphs:
            self._graphs[width, kind] = record()
        return self._graphs[width, kind]

    def __len__(self) -> int:
        return len(self._graphs)


def decode_buckets(max_num_seqs: int) -> list[int]:
    """Widths to record: 1, 2, 4, 8, then every 16th, and the largest batch there can be."""
    widths = {1, 2, 4, 8, *range(16, max_num_seqs, 16), max_num_seqs}
    return sorted(width for width in widths if width <= max_num_seqs)


class HostRing:
    """Pinned buffers for copies that the host does not wait for; on CPU plain copies.

    A copy to or from pinned memory runs later, on the current stream. So a buffer may be used again only after the event
    behind its last copy. A step takes up to four of them, and one step is in flight: that event has long passed.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype = dtype
        self._device = device
        self._on_gpu = device.type == "cuda"
        self._buffers = [torch.empty(0, dtype=dtype) for _ in range(SLOTS)]
        self._events = [torch.cuda.Event() for _ in range(SLOTS * self._on_gpu)]  # behind the last copy of each buffer
        self._next = 0

    def stage(self, array: npt.NDArray[np.int32]) -> torch.Tensor:
        """`array` [n] in pinned memory; the caller queues the copy to the device and then calls `mark`."""
        if not self._on_gpu:
            return torch.from_numpy(array.copy())
        slot = self._take(len(array))
        slot.numpy()[:] = array
        return slot

    def to_device(self, array: npt.NDArray[np.int32]) -> torch.Tensor:
        """A copy of `array` [n] on the device."""
        staged = self.stage(array).to(self._device, non_blocking=True)
        self.mark()
        return staged

    def to_host(self, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event | None]:
        """A copy of `tensor` [n] in host memory, complete once the event has passed.

        It is queued on the current stream, and so delays the next step by a microsecond or two. A stream of its own would
        not help: the next step writes `tensor` again, at an address that its graph cannot change, and would have to wait
        for the copy, or for one that puts the numbers aside and takes as long.
        """
        if not self._on_gpu:
            return tensor.clone(), None
        slot = self._take(len(tensor))
        slot.copy_(tensor, non_blocking=True)
        return slot, self.mark()

    def mark(self) -> torch.cuda.Event | None:
        """Note that all copies of the current buffer are queued; moves on to the next."""
        if not self._on_gpu:
            return None
        event = self._events[self._next]
        event.record()
        self._next = (self._next + 1) % SLOTS
        return event

    def _take(self, length: int) -> torch.Tensor:
        """The current buffer, free and long enough."""
        self._events[self._next].synchronize()
        if len(self._buffers[self._next]) < length:
            self._buffers[self._next] = torch.empty(2 * length, dtype=self._dtype, pin_memory=True)
        return self._buffers[self._next][:length]
