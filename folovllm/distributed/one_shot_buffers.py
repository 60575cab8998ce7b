"""Buffers of each rank that the other ranks write to, so that a kernel can sum over the ranks itself.

A partial sum is sent as 8 bytes: a float32 in the low half, and the number of its sum in the high half. Both arrive together.
So a rank that reads the right number has the value too. It waits for nothing else, and no buffer is reset.

Each program of a kernel has its own entry in the buffers and its own count of sums. So a captured step, whose launches never
change, uses new numbers in every replay. An entry has two sides, for odd and even sums. Before a program writes sum n + 2,
the other ranks are done with sum n: the program has read their sum n + 1, which they wrote after the kernel of sum n.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

MOST_PROGRAMS = 8192  # of a kernel
VALUES = 16  # from one rank to another, of one program in one sum


@dataclass(frozen=True, slots=True)
class OneShotBuffers:
    """The buffers of all ranks, and the number of each program's next sum. All ranks launch the same kernels."""

    rank: int
    buffers: tuple[torch.Tensor, ...]  # by rank [MOST_PROGRAMS, 2 sides, senders, VALUES] int64
    numbers: torch.Tensor  # [MOST_PROGRAMS] int32, of each program's next sum

    @classmethod
    def of(cls, rank: int, buffers: tuple[torch.Tensor, ...]) -> OneShotBuffers:
        """Return the state of a rank before its first sum. Its buffer must be zero, because no sum has the number 0."""
        return cls(rank, buffers, torch.ones(MOST_PROGRAMS, dtype=torch.int32, device=buffers[rank].device))

    @classmethod
    def shared(cls, rank: int, size: int, device: torch.device) -> OneShotBuffers:
        """Allocate the rank's buffer on its GPU, and map the buffers of all other ranks. All ranks call this together."""
        import torch.distributed._symmetric_memory as symm_mem

        assert dist.group.WORLD is not None
        own = symm_mem.empty(buffer_shape(size), dtype=torch.int64, device=device).zero_()
        handle = symm_mem.rendezvous(own, dist.group.WORLD.group_name)
        buffers = (own if other == rank else handle.get_buffer(other, own.shape, own.dtype) for other in range(size))
        return cls.of(rank, tuple(buffers))

    def write_trial(self) -> None:
        """Write a trial value to all ranks. No sum reads it, because its sum number is 0."""
        for buffer in self.buffers:
            buffer[0, 0, self.rank] = 1 + self.rank

    def has_trials(self) -> bool:
        """Return whether the trial values of all ranks have arrived. Call it after all ranks have written."""
        buffer = self.buffers[self.rank]
        senders = torch.arange(1, 1 + len(self.buffers), device=buffer.device)
        return bool((buffer[0, 0] == senders[:, None]).all())


def buffer_shape(size: int) -> tuple[int, int, int, int]:
    """Return the shape of one rank's buffer in `OneShotBuffers`."""
    return MOST_PROGRAMS, 2, size, VALUES
