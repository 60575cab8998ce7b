"""Weights from another process, over torch.distributed: gloo between CPUs, NCCL between GPUs.

The trainer calls `broadcast_weights`, and each engine `update_weights(llm, receive_weights(...))` in the same group.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist

Header = list[tuple[str, torch.Size, torch.dtype]]


def broadcast_weights(
    weights: Mapping[str, torch.Tensor], src: int = 0, group: dist.ProcessGroup | None = None
) -> None:
    """Send weights from rank `src`, which calls this, to the other ranks of `group`: names and shapes, then each tensor."""
    header: Header = [(name, tensor.shape, tensor.dtype) for name, tensor in weights.items()]
    dist.broadcast_object_list([header], src, group)
    for tensor in weights.values():
        dist.broadcast(tensor.detach().contiguous(), src, group)


def receive_weights(
    src: int = 0, group: dist.ProcessGroup | None = None, device: str = "cpu"
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield names and tensors that rank `src` broadcasts, one at a time, so that no second copy of the model is held.

    All of them must be taken, or the sender waits. `update_weights` takes the rest even if it fails.
    """
    received: list[Header] = [[]]
    dist.broadcast_object_list(received, src, group)
    for name, shape, dtype in received[0]:
        tensor = torch.empty(shape, dtype=dtype, device=device)
        dist.broadcast(tensor, src, group)
        yield name, tensor
