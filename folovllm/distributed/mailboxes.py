"""Memory of each rank that the other ranks write to, so that a kernel can add up over ranks in its last lines.

A number travels as a letter: 8 bytes, a float32 and above it the number of the sum that it belongs to. They arrive together,
so who finds the right number of a sum in its box has the part, too. Nothing else must be waited for, and nothing is reset.

Each program of a kernel has a place of its own in the boxes, and its own count of sums: so a recorded step, whose launches
are always the same, finds new numbers in every replay. A place has two sides, for odd and even sums. Before a program writes
sum n + 2, the others are done with sum n: it has their letters of sum n + 1, which they wrote after the kernel with sum n.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist

logger = logging.getLogger("folovllm")

MOST_PROGRAMS = 8192  # of a kernel
LETTERS = 16  # from one rank to another, of one program in one sum


@dataclass(frozen=True, slots=True)
class Mailboxes:
    """What one rank knows: all boxes, and how often its own programs have added up. All ranks launch the same kernels."""

    rank: int
    boxes: tuple[torch.Tensor, ...]  # by rank [programs, 2 sides, senders, LETTERS] int64
    numbers: torch.Tensor  # [programs] int32, of each program's next sum

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return len(self.boxes)

    @classmethod
    def of(cls, rank: int, boxes: tuple[torch.Tensor, ...]) -> Mailboxes:
        """Those of a rank that has not added up anything so far. Its box is empty: no sum has the number 0."""
        return cls(rank, boxes, torch.ones(len(boxes[rank]), dtype=torch.int32, device=boxes[rank].device))


def box_shape(size: int) -> tuple[int, int, int, int]:
    """Of one box, as `Mailboxes` has it."""
    return MOST_PROGRAMS, 2, size, LETTERS


def make_mailboxes(rank: int, size: int, device: torch.device) -> Mailboxes | None:
    """Return boxes of GPUs that see each other's memory, if a trial says that letters arrive. All ranks call this together.

    `FOLOVLLM_MAILBOXES=0` does without, to compare.
    """
    if os.environ.get("FOLOVLLM_MAILBOXES") == "0":
        return None
    mailboxes = None
    try:
        mailboxes = share(rank, size, device)
    except (RuntimeError, ImportError, AttributeError) as error:
        logger.warning("no sums in the kernels of products (%s): kernels of their own add up", error)
    meet(device)  # all boxes are there, and empty
    if mailboxes is not None:
        for box in mailboxes.boxes:
            box[0, 0, rank] = 1 + rank
    meet(device)
    arrived = torch.zeros(1, dtype=torch.int64, device=device)
    if mailboxes is not None:
        found = mailboxes.boxes[rank][0, 0]  # [senders, LETTERS]
        arrived += (found == torch.arange(1, size + 1, device=device)[:, None]).all()
    dist.all_reduce(arrived, op=dist.ReduceOp.MIN)
    if not arrived.item():
        return None
    assert mailboxes is not None
    mailboxes.boxes[rank].zero_()
    meet(device)
    return mailboxes


def share(rank: int, size: int, device: torch.device) -> Mailboxes:
    """Allocate the rank's box, and map those of all others."""
    import torch.distributed._symmetric_memory as symm_mem

    assert dist.group.WORLD is not None
    shape = box_shape(size)
    own = symm_mem.empty(shape, dtype=torch.int64, device=device).zero_()
    handle = symm_mem.rendezvous(own, dist.group.WORLD.group_name)
    boxes = (own if other == rank else handle.get_buffer(other, shape, torch.int64) for other in range(size))
    return Mailboxes.of(rank, tuple(boxes))


def meet(device: torch.device) -> None:
    """Wait until all ranks are here, and all that they have started is done."""
    torch.cuda.synchronize(device)
    dist.all_reduce(torch.zeros(1, device=device))
    torch.cuda.synchronize(device)
