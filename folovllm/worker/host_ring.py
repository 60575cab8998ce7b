"""Host memory that a device copies from or to while the host goes on: a few buffers in turn, none reused too early."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

SLOTS = 8


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
