"""Copies from the host to a GPU."""

from __future__ import annotations

import torch

PIECE = 32 << 20  # bytes that are pinned at a time


def copy_in_pieces(view: torch.Tensor, tensor: torch.Tensor) -> None:
    """Copy a tensor of one dimension or more from the host to a GPU, piece by piece through pinned memory.

    While the GPU fetches a piece, all of the host's threads read the next one from its file. Copied whole, one thread of the
    driver would do both.
    """
    rows = max(1, PIECE * len(tensor) // max(1, tensor.nbytes))
    for part, piece in zip(view.split(rows), tensor.split(rows), strict=True):
        part.copy_(piece.to(part.dtype).pin_memory(), non_blocking=True)
