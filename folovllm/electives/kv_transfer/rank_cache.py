"""The cache of a rank as lines of words, one a block, and the one move between it and other memory of its device."""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.distributed as dist


def cache_of(worker: Any) -> torch.Tensor:
    """A worker's cache as [2L, N, words of 4 bytes]: a block is 2L pieces, K and V of each layer."""
    runner = getattr(worker.runner, "inner", worker.runner)  # the one within, where steps are captured
    cache: torch.Tensor = runner.kv_cache.view(torch.int32)  # [L, 2, N, Hkv, B, D]
    return cache.flatten(3).flatten(0, 1)


def block_bytes_of(worker: Any) -> int:
    """The bytes of a block on this rank."""
    cache = cache_of(worker)
    return cache.nbytes // cache.shape[1]


def rank_of(num_ranks: int) -> int:
    """This process's number among an engine's ranks."""
    return dist.get_rank() if num_ranks > 1 else 0


def move(cache: torch.Tensor, lines: torch.Tensor, block_ids: torch.Tensor, *, to_cache: bool) -> None:
    """Move `lines` [k, 2L, words] to or from the blocks `block_ids` [k] int32 of `cache` [2L, N, words], on the current stream."""
    if cache.is_cuda:
        from folovllm.electives.kv_transfer.kernels.pieces import move_pieces  # Triton may be missing on a CPU

        move_pieces(cache, lines, block_ids, to_cache=to_cache)
    elif to_cache:
        cache[:, block_ids] = lines.transpose(0, 1)
    else:
        lines.copy_(cache[:, block_ids].transpose(0, 1))


def on_device(block_ids: list[int], device: torch.device) -> torch.Tensor:
    """Block ids as `move` takes them; the host does not wait for a GPU to have them."""
    ids = torch.tensor(block_ids, dtype=torch.int32)
    return ids.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else ids


def pin(memory: torch.Tensor, owner: object) -> weakref.finalize[..., Any] | None:
    """Pin memory until the result is called or `owner` is gone. None: it cannot be pinned. (torch's own rounds up to a power of two.)"""
    cudart = torch.cuda.cudart()
    if int(cudart.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)) != 0:
        return None
    return weakref.finalize(owner, cudart.cudaHostUnregister, memory.data_ptr())
