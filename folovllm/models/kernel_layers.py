"""Which layers a model is built from where there are kernels for them: on a GPU (M4, M6) or a CPU (M6)."""

from __future__ import annotations

from dataclasses import replace

from folovllm.engine.setup import EngineSetup
from folovllm.layers.layer_set import LayerSet
from folovllm.models.written_files import cache_dir

LARGE = 50_000_000  # bytes of weights: below this, kernels for a CPU gain less than their compiling takes


def kernel_layers(setup: EngineSetup) -> LayerSet:
    """One kernel instead of several operations (M4), kernels for few tokens, and products that norm and add as they go (M6); or
    layers that are compiled, where that is asked for. Plain ones where there are no kernels.
    """
    if setup.config.compile:
        from folovllm.layers.compiled import compiled_layers

        return replace(compiled_layers(), kernels=setup.device.type == "cuda")
    if "triton" in setup.backend or "flash_attn" in setup.backend:
        from folovllm.models.fused import fused_layers
        from folovllm.models.fused_layer import skinny_layers

        return (skinny_layers if setup.config.packed_steps else fused_layers)(setup.attention.head_dim)
    is_large = setup.device.type == "cpu" and setup.backend == "torch_paged" and weight_bytes(setup) >= LARGE
    return layers_for_cpu(setup) if setup.config.packed_steps and is_large else LayerSet()


def layers_for_cpu(setup: EngineSetup) -> LayerSet:
    """Layers with kernels for a CPU; plain ones without a compiler."""
    from folovllm.kernels.cpu.library import load
    from folovllm.kernels.cpu.ops import CpuKernels
    from folovllm.models.cpu_layers import cpu_layers

    library = load(setup.dtype, cache_dir)
    return LayerSet() if library is None else cpu_layers(CpuKernels(library, setup.dtype))


def weight_bytes(setup: EngineSetup) -> int:
    """Bytes of the head and of all MLPs, about: most of a model."""
    config = setup.hf_config
    inner = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    return int(config.hidden_size * (config.vocab_size + 3 * config.num_hidden_layers * inner) * setup.dtype.itemsize)
