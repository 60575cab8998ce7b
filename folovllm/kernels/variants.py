"""Kernel variants: a kernel that stands for a plain one on cards of one kind, where it serves and is faster."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch

from folovllm.electives import KERNEL_VARIANTS, is_installed, named


@dataclass(frozen=True, slots=True)
class KernelVariant:
    """What a package registers for a plain kernel in `folovllm.electives.KERNEL_VARIANTS`.

    Attributes:
        serves: called where the plain kernel would be launched; True if this one can compute it, and is faster. Its
            arguments are the plain kernel's business: the code that launches that says which they are.
        launch: takes the plain kernel's arguments, and returns the same up to rounding. The plain one stays its test.
    """

    serves: Callable[..., bool]
    launch: Callable[..., torch.Tensor]


@cache
def kernel_variant(kernel: str, device: torch.device) -> KernelVariant | None:
    """Return the variant of `kernel` for the card `device`; None if there is none, or its package is not installed."""
    capability, place = KERNEL_VARIANTS[kernel]
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != capability or not is_installed(place):
        return None
    found: KernelVariant = named(place)
    return found
