"""Which layers the model is built from, by configuration: the part of `folovllm.build` that knows the kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from folovllm.engine.cpu_threads import largest_product
from folovllm.files import cache_dir
from folovllm.layers.layer_set import LayerSet
from folovllm.setup import EngineSetup

if TYPE_CHECKING:
    from folovllm.kernels.cpu.ops import CpuKernels

LARGE = 50_000_000  # bytes of weights: more than a processor's cache holds


def layer_set(setup: EngineSetup, counters: dict[str, torch.Tensor] | None = None) -> LayerSet:
    """What the model is built from, and where it counts what it does (`LayerSet`)."""
    return replace(kernels_for(setup), counters=counters)


def kernels_for(setup: EngineSetup) -> LayerSet:
    """Plain torch (M1), one kernel instead of several operations (M4), kernels for few tokens, and products that norm and
    add as they go (M6); or layers that are compiled, where that is asked for.
    """
    if setup.config.compile:
        from folovllm.layers.compiled import compiled_layers

        return replace(compiled_layers(), kernels=setup.device.type == "cuda")
    if (kernels := cpu_kernels(setup)) is not None:
        from folovllm.models.cpu_layers import cpu_layers

        return cpu_layers(kernels)
    if "triton" not in setup.backend and "flash_attn" not in setup.backend:
        return LayerSet()
    from folovllm.models.fused import fused_layers
    from folovllm.models.fused_layer import skinny_layers

    return (skinny_layers if setup.config.packed_steps else fused_layers)(setup.attention.head_dim)


def cpu_kernels(setup: EngineSetup) -> CpuKernels | None:
    """Kernels for a CPU, where they can be had (M6). A small model would wait for the compiler, and gain little."""
    wanted = setup.device.type == "cpu" and setup.backend == "torch_paged" and setup.config.packed_steps
    if not wanted or weight_bytes(setup) < LARGE:
        return None
    from folovllm.kernels.cpu.library import load
    from folovllm.kernels.cpu.ops import CpuKernels

    library = load(setup.dtype, cache_dir)
    return None if library is None else CpuKernels(library, setup.dtype)


def weight_bytes(setup: EngineSetup) -> int:
    """Bytes of the head and of all MLPs, about: most of a model."""
    outputs, inputs = largest_product(setup, 1)
    return inputs * (setup.vocab_size + 3 * setup.num_layers * outputs) * setup.dtype.itemsize
