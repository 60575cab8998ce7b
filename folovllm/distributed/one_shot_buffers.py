"""Memory of each rank that the other ranks write to, so that a kernel can add up over ranks in its last lines.

A number travels as a letter: 8 bytes, a float32 and above it the number of the sum that it belongs to. They arrive together,
so a rank that finds the right number of a sum in its box has the part, too. It waits for nothing else, and nothing is reset.

Each program of a kernel has a place of its own in the boxes, and its own count of sums: so a recorded step, whose launches
are always the same, finds new numbers in every replay. A place has two sides, for odd and even sums. Before a program writes
sum n + 2, the others are done with sum n: it has their letters of sum n + 1, which they wrote after the kernel with sum n.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

MOST_PROGRAMS = 8192  # of a kernel
LETTERS = 16  # from one rank to another, of one program in one sum


@dataclass(frozen=True, slots=True)
class OneShotBuffers:
    """What one rank knows: all boxes, and how often its own programs have added up. All ranks launch the same kernels."""

    rank: int
    buffers: tuple[torch.Tensor, ...]  # by rank [MOST_PROGRAMS, 2 sides, senders, LETTERS] int64
    numbers: torch.Tensor  # [MOST_PROGRAMS] int32, of each program's next sum

    @classmethod
    def of(cls, rank: int, buffers: tuple[torch.Tensor, ...]) -> OneShotBuffers:
        """Those of a rank that has not added up anything so far. Its box is empty: no sum has the number 0."""
        return cls(rank, buffers, torch.ones(MOST_PROGRAMS, dtype=torch.int32, device=buffers[rank].device))

    @classmethod
    def shared(cls, rank: int, size: int, device: torch.device) -> OneShotBuffers:
        """Allocate the rank's box on its GPU, and map those of all others. All ranks call this together."""
        import torch.distributed._symmetric_memory as symm_mem

        assert dist.group.WORLD is not None
        own = symm_mem.empty(buffer_shape(size), dtype=torch.int64, device=device).zero_()
        handle = symm_mem.rendezvous(own, dist.group.WORLD.group_name)
        buffers = (own if other == rank else handle.get_buffer(other, own.shape, own.dtype) for other in range(size))
        return cls.of(rank, tuple(buffers))

    def greet(self) -> None:
        """Write to all ranks, for a trial. No sum takes that for a letter: its number would be 0."""
        for box in self.buffers:
            box[0, 0, self.rank] = 1 + self.rank

    def is_greeted(self) -> bool:
        """Whether all ranks' greetings are here, once all have sent theirs."""
        box = self.buffers[self.rank]
        senders = torch.arange(1, 1 + len(self.buffers), device=box.device)
        return bool((box[0, 0] == senders[:, None]).all())


def buffer_shape(size: int) -> tuple[int, int, int, int]:
    """Of one box, as `OneShotBuffers` has it."""
    return MOST_PROGRAMS, 2, size, LETTERS
