"""Programmatic dependent launch: a kernel starts while the previous one ends, and waits before it reads its results.

Otherwise a GPU idles for about a microsecond between two dependent kernels of a graph, and a decode step at batch 1 has two
hundred kernels of a few microseconds each. It needs compute capability 9.0 (Hopper) or later.
"""

from __future__ import annotations

import os
from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

MAX_TOKENS = 8


@triton.jit
def let_next_start(PDL: tl.constexpr):
    """Let the next kernel start once all programs of this one have called it. An earlier call hides more of the start."""
    if PDL:
        gdc_launch_dependents()


@triton.jit
def wait_for_inputs(PDL: tl.constexpr):
    """Wait until all kernels before this one are complete and their writes are visible.

    Every kernel that is launched with `launch_options` calls it before it writes, and before it reads another kernel's output.
    Before this call it may read weights. It may also read what was complete before an earlier kernel without these options,
    since that kernel overlaps with none (`prefetching_decode`). A program without work may end without this call, if another
    program of its launch makes it.
    """
    if PDL:
        gdc_wait()


@cache
def available(device: torch.device) -> bool:
    """Return whether kernels on `device` overlap in this way. FOLOVLLM_PDL=0 disables it, for comparison."""
    if device.type != "cuda" or triton.knobs.runtime.interpret or os.environ.get("FOLOVLLM_PDL") == "0":
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)


def launch_options(device: torch.device, num_tokens: int) -> dict[str, bool]:
    """Return the keywords of a launch whose kernel takes `PDL` and calls `let_next_start` and `wait_for_inputs`.

    Kernels overlap only for few tokens. At large batch they are long, and it gained nothing (`docs/performance_log.md`).
    """
    return {"PDL": True, "launch_pdl": True} if num_tokens <= MAX_TOKENS and available(device) else {"PDL": False}
