"""How many programs a GPU runs side by side depends on its multiprocessors."""

from __future__ import annotations

from functools import cache

import torch


@cache
def num_sms(device: torch.device) -> int:
    """The multiprocessors of a GPU; without one two, so that work is divided where Triton interprets, too."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2
