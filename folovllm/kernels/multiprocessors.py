"""What a kernel's tiles depend on: how many multiprocessors a GPU has, and of which generation."""

from __future__ import annotations

from functools import cache

import torch


@cache
def num_sms(device: torch.device) -> int:
    """The multiprocessors of a GPU; without one two, so that work is divided where Triton interprets, too."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


@cache
def capability_of(device: torch.device) -> int:
    """10 times the compute capability of a card, 80 for Ampere's first; where there is none, as the interpreter needs it."""
    major, minor = torch.cuda.get_device_capability(device) if device.type == "cuda" else (8, 0)
    return 10 * major + minor
