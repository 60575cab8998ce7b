"""Graphs: captured device work that one call replays. Also the store that keeps them, and their pinned host buffers.

A graph is a CUDA graph, or on a CPU an object that behaves like one.
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
    """Capture once, replay often. A replay reads and writes the same memory as the capture."""

    static_input: torch.Tensor

    def capture(self, run: Callable[[torch.Tensor], None]) -> None:
        """Capture `run(static_input)`."""

    def replay(self, value: torch.Tensor) -> None:
        """Copy `value` into the static input and run the captured work again."""


class CudaGraph:
    """A CUDA graph: one launch replays all launches of a step."""

    def __init__(self, static_input: torch.Tensor, pool: Any, stream: torch.cuda.Stream, had_dry_run: bool) -> None:
        """Graphs of one `pool` and one `stream` share their memory. `stream` must be on the captured device.

        `had_dry_run`: a dry run has already done what `run` compiles, loads or allocates at its first call.
        """
        self.static_input = static_input
        self._graph = torch.cuda.CUDAGraph()
        self._pool = pool
        self._stream = stream
        self._had_dry_run = had_dry_run

    def capture(self, run: Callable[[torch.Tensor], None]) -> None:
        """Capture `run(static_input)`. Without a dry run it runs once before, to compile its kernels.

        A kernel that the dry run missed is loaded during the capture, which the mode "relaxed" allows.
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


class CpuGraph:
    """Behaves like a CUDA graph on a CPU, for tests and teaching: a replay calls `run` again over the same static input.

    Like a CUDA graph it reads only that memory. After each replay the input is poisoned. So a replay that does not copy all of
    its input computes nonsense, and the mistake shows.
    """

    def __init__(self, static_input: torch.Tensor) -> None:
        self.static_input = static_input
        self._run: Callable[[torch.Tensor], None] | None = None

    def capture(self, run: Callable[[torch.Tensor], None]) -> None:
        """Run `run(static_input)` once and remember it; then poison the input.

        Capturing works on made-up input; what it leaves behind must not be read.
        """
        run(self.static_input)
        self._run = run
        self.static_input.fill_(POISON)

    def replay(self, value: torch.Tensor) -> None:
        """Copy `value` into the static input, run again, poison the input.

        Raises RuntimeError before a capture; its sentence names `capture`.
        """
        if self._run is None:
            raise RuntimeError("nothing was captured: call capture first")
        self.static_input.copy_(value)
        self._run(self.static_input)
        self.static_input.fill_(POISON)


class GraphPool:
    """Captures graphs; on a GPU they share one pool of memory, since they never run at the same time."""

    def __init__(self, device: torch.device, had_dry_run: bool = False) -> None:
        """`had_dry_run`: a dry run has run all work that will be captured (see `CudaGraph`)."""
        self._device = device
        self._had_dry_run = had_dry_run
        self._shared: tuple[Any, torch.cuda.Stream, bool] | None = None
        if device.type == "cuda":
            self._shared = torch.cuda.graph_pool_handle(), torch.cuda.Stream(device), had_dry_run

    def anew(self) -> GraphPool:
        """Return a pool of the same kind with memory of its own."""
        return GraphPool(self._device, self._had_dry_run)

    def capture(self, padding: npt.NDArray[np.int32], work: Callable[[torch.Tensor], None]) -> StepGraph:
        """Capture `work` on a static input like `padding`. `work` may run with it now, and must change no request's state."""
        static_input = torch.from_numpy(padding).to(self._device)
        graph = CpuGraph(static_input) if self._shared is None else CudaGraph(static_input, *self._shared)
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
    def get(self, width: int, kind: str, capture: Callable[[], StepGraph]) -> StepGraph:
        """The graph of `width` and `kind`. `capture()` makes one, which takes time and memory."""

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of graphs that are kept now."""


class AllGraphs(GraphStore):
    """Keeps the graphs of all decode buckets."""

    def __init__(self, max_num_seqs: int) -> None:
        self.widths = decode_buckets(max_num_seqs)
        self._graphs: dict[tuple[int, str], StepGraph] = {}

    def get(self, width: int, kind: str, capture: Callable[[], StepGraph]) -> StepGraph:
        """Return the graph of `width` and `kind`. It is captured at its first use, and kept."""
        if (width, kind) not in self._graphs:
            self._graphs[width, kind] = capture()
        return self._graphs[width, kind]

    def __len__(self) -> int:
        return len(self._graphs)


def decode_buckets(max_num_seqs: int) -> list[int]:
    """Return the widths to capture: 1, 2, 4, 8, then every 16th, and `max_num_seqs`."""
    widths = {1, 2, 4, 8, *range(16, max_num_seqs, 16), max_num_seqs}
    return sorted(width for width in widths if width <= max_num_seqs)


class HostRing:
    """Pinned buffers for copies that the host does not wait for. On a CPU it makes plain copies.

    A copy to or from pinned memory runs later, on the current stream. So a buffer may be used again only after the event that
    follows its last copy. A step takes up to four buffers, and one step is in flight. So that event has passed long before.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype = dtype
        self._device = device
        self._on_gpu = device.type == "cuda"
        self._buffers = [torch.empty(0, dtype=dtype) for _ in range(SLOTS)]
        self._events = [torch.cuda.Event() for _ in range(SLOTS * self._on_gpu)]  # after the last copy of each buffer
        self._next = 0

    def stage(self, array: npt.NDArray[np.int32]) -> torch.Tensor:
        """Return `array` [n] in pinned memory. The caller queues the copy to the device, then calls `mark`."""
        if not self._on_gpu:
            return torch.from_numpy(array.copy())
        slot = self._take(len(array))
        slot.numpy()[:] = array
        return slot

    def to_device(self, array: npt.NDArray[np.int32]) -> torch.Tensor:
        """Return a copy of `array` [n] on the device."""
        staged = self.stage(array).to(self._device, non_blocking=True)
        self.mark()
        return staged

    def to_host(self, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event | None]:
        """Return a copy of `tensor` [n] in host memory, which is complete after the event.

        The copy is queued on the current stream, and delays the next step by a microsecond or two. A second stream would not
        help. The next step's graph writes `tensor` at the same address, so it would have to wait for the copy.
        """
        if not self._on_gpu:
            return tensor.clone(), None
        slot = self._take(len(tensor))
        slot.copy_(tensor, non_blocking=True)
        return slot, self.mark()

    def mark(self) -> torch.cuda.Event | None:
        """Record the event of the current buffer after its copies were queued, and move on to the next buffer."""
        if not self._on_gpu:
            return None
        event = self._events[self._next]
        event.record()
        self._next = (self._next + 1) % SLOTS
        return event

    def _take(self, length: int) -> torch.Tensor:
        """Wait until the current buffer is free, and return `length` numbers of it."""
        self._events[self._next].synchronize()
        if len(self._buffers[self._next]) < length:
            self._buffers[self._next] = torch.empty(2 * length, dtype=self._dtype, pin_memory=True)
        return self._buffers[self._next][:length]
