"""How a multiprocessor divides its memory into shared memory and L1 cache, for the kernels of one or two tokens.

A kernel may say which share it wants as shared memory. Else the driver decides, and differently for a product, which needs
none, and for attention. A multiprocessor must be empty to be divided anew, so the programs of the next kernel cannot start
beside the last ones of this kernel, which is what `pdl` is for. All kernels of a layer want the same here: a lone token took
7% less (`docs/performance_log.md`). Four tokens took 3 to 10% more, so their products ask for nothing. Their attention, which is
the same kernel as that of one token, does: alone that changed nothing. Products with FP8 codes ask for nothing either: a lone
token took 2% more when they did.
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
    """Say what `kernel`, loaded on the current device, wants, if it is one of these. It is a wish: no result changes.

    Raises:
        RuntimeError: the driver does not know the kernel.
    """
    if not (wants_a_share(kernel) and torch.cuda.is_available() and available(torch.device("cuda"))):
        return
    function = ctypes.c_void_p(kernel.function)
    if error := ctypes.CDLL("libcuda.so.1").cuFuncSetAttribute(function, PREFERRED_CARVEOUT, SHARE):
        raise RuntimeError(f"{kernel.name} cannot say how memory is to be divided: CUDA's error {error}")


def wants_a_share(kernel: CompiledKernel) -> bool:
    """Whether this is a kernel of each layer, for one or two tokens."""
    if kernel.name == "skinny_linear_kernel":
        source = kernel.src
        return bool(source.constants[(source.fn.arg_names.index("M"),)] <= MOST_TOKENS)
    return kernel.name == "prefetching_decode_kernel"
