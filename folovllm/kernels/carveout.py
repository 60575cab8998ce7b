"""The carveout of kernels for one or two tokens: the share of a multiprocessor's memory that is shared memory, not L1 cache.

A kernel may ask for a share. Else the driver chooses one, and chooses differently for linear layers, which need no shared memory,
and for attention. A multiprocessor can change its carveout only while it is empty. Then the programs of the next kernel cannot
start beside the last ones of this kernel, as `pdl` wants. So here all kernels of a layer ask for the same share.

A step of one token took 7% less (`docs/performance_log.md`). Four tokens took 3 to 10% more, so their linear layers ask for
nothing. Their attention is the same kernel as that of one token and asks, which alone changed nothing. FP8 linear layers do not
ask: with them a step of one token took 2% more.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import torch

from folovllm.kernels.pdl import available

if TYPE_CHECKING:
    from triton.compiler import CompiledKernel

PREFERRED_CARVEOUT = 9  # of CUDA's function attributes
SHARE = 57  # percent, 132 KB on Hopper: room for two programs of `prefetching_decode`
MOST_TOKENS = 2


def divide_memory(kernel: CompiledKernel) -> None:
    """Set the carveout of `kernel`, loaded on the current device, if it is one of these kernels. No result changes.

    Raises:
        RuntimeError: the driver does not know the kernel.
    """
    if not (wants_a_share(kernel) and torch.cuda.is_available() and available(torch.device("cuda"))):
        return
    function = ctypes.c_void_p(kernel.function)
    if error := ctypes.CDLL("libcuda.so.1").cuFuncSetAttribute(function, PREFERRED_CARVEOUT, SHARE):
        raise RuntimeError(f"the carveout of {kernel.name} cannot be set: CUDA's error {error}")


def wants_a_share(kernel: CompiledKernel) -> bool:
    """Return whether this is a layer's linear or attention kernel for one or two tokens."""
    if kernel.name == "skinny_linear_kernel":
        source = kernel.src
        return bool(source.constants[(source.fn.arg_names.index("M"),)] <= MOST_TOKENS)
    return kernel.name == "prefetching_decode_kernel"
