"""Kernel variants: a faster kernel that replaces a plain one on one kind of card."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch

from folovllm.plugins import KERNEL_VARIANTS, is_installed, named


@dataclass(frozen=True, slots=True)
class KernelVariant:
    """A faster kernel that a package registers in `folovllm.plugins.KERNEL_VARIANTS`.

    Attributes:
        is_supported: called before the plain kernel is launched; returns whether this one can compute it and is faster. The code that
            launches the plain kernel defines the arguments.
        launch: takes the plain kernel's arguments, and returns the same result up to rounding. Tests compare the two.
    """

    is_supported: Callable[..., bool]
    launch: Callable[..., torch.Tensor]


@cache
def kernel_variant(kernel: str, device: torch.device) -> KernelVariant | None:
    """Return the variant of `kernel` for the card `device`; None if there is none, or its package is not installed."""
    capability, place = KERNEL_VARIANTS[kernel]
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != capability or not is_installed(place):
        return None
    found: KernelVariant = named(place)
    return found
