"""Kinds of cards, on which a kernel's tiles depend; and variants: a faster kernel that replaces a plain one on one kind of card."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch

from folovllm.plugins import KERNEL_VARIANTS, is_installed, named


@cache
def num_sms(device: torch.device) -> int:
    """Return the number of multiprocessors of a GPU. Without a GPU it is 2, so that the interpreter divides work, too."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


@cache
def capability_of(device: torch.device) -> int:
    """Return 10 times the compute capability of a card: 80 for Ampere's first, and 80 without a GPU, for the interpreter."""
    major, minor = torch.cuda.get_device_capability(device) if device.type == "cuda" else (8, 0)
    return 10 * major + minor


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
