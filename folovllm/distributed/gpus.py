"""Whether there are enough GPUs for the ranks."""

from __future__ import annotations

import os

import torch


def check_gpus(device: torch.device, tensor_parallel_size: int) -> None:
    """Raise ValueError unless each rank of this machine can have a GPU of its own, the ranks' numbers counting from 0."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", tensor_parallel_size))  # under torchrun some are elsewhere
    if device.type != "cuda":
        return
    if device.index:
        raise ValueError(
            f"tensor_parallel_size {tensor_parallel_size} takes the first GPUs: device {device} cannot be kept"
        )
    if torch.cuda.device_count() < ranks:
        raise ValueError(
            f"tensor_parallel_size {tensor_parallel_size} needs {ranks} GPUs here, and there are "
            f"{torch.cuda.device_count()}: lower it, or make more visible (CUDA_VISIBLE_DEVICES)"
        )
