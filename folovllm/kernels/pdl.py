"""Programmatic dependent launch: a kernel may start while the one before it ends, and waits where it needs its results.

Between two dependent kernels of a graph a GPU otherwise idles for about a microsecond, and a decode step at batch 1 is
two hundred kernels of a few microseconds each. Needs compute capability 9.0 (Hopper) or later.
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
    """Let the next kernel start as soon as all programs of this one have. The earlier, the more of it is hidden."""
    if PDL:
        gdc_launch_dependents()


@triton.jit
def wait_for_inputs(PDL: tl.constexpr):
    """Wait until all kernels before this one are complete and their writes visible.

    Every kernel that is launched with `launch_options` calls it before it reads what another kernel wrote and before it
    writes anything. It may read earlier what was there from the start, as weights are; and what was complete before some
    kernel without these options began, since nothing overlaps with that one (`prefetching_decode`). A program without work may
    end without this call, if another program of its launch makes it.
    """
    if PDL:
        gdc_wait()


@cache
def available(device: torch.device) -> bool:
    """Whether kernels on `device` overlap in this way. FOLOVLLM_PDL=0 turns it off, to measure what it gains."""
    if device.type != "cuda" or triton.knobs.runtime.interpret or os.environ.get("FOLOVLLM_PDL") == "0":
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)


def launch_options(device: torch.device, num_tokens: int) -> dict[str, bool]:
    """Keywords of a launch whose kernel takes `PDL` and calls `let_next_start` and `wait_for_inputs`.

    Only for few tokens: at large batch the kernels are long, and nothing was gained (`docs/performance_log.md`).
    """
    return {"PDL": True, "launch_pdl": True} if num_tokens <= MAX_TOKENS and available(device) else {"PDL": False}
