"""The number of multiprocessors of a GPU and its compute capability, on which a kernel's tiles depend."""

from __future__ import annotations

from functools import cache

import torch


@cache
def num_sms(device: torch.device) -> int:
    """Return the number of multiprocessors of a GPU. Without a GPU it is 2, so that the interpreter divides work, too."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


@cache
def capability_of(device: torch.device) -> int:
    """Return 10 times the compute capability of a card: 80 for Ampere's first, and 80 without a GPU, for the interpreter."""
    major, minor = torch.cuda.get_device_capability(device) if device.type == "cuda" else (8, 0)
    return 10 * major + minor
