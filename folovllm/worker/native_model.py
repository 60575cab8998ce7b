"""Our model with its weights, and its attention layers in order."""

from __future__ import annotations

from folovllm.distributed.group import Group
from folovllm.layers.attention import Attention
from folovllm.models.llama import LlamaForCausalLM
from folovllm.models.loader import init_random_weights, load_model
from folovllm.models.registry import build_model
from folovllm.setup import EngineSetup


def load_native_model(setup: EngineSetup) -> LlamaForCausalLM:
    """Build the model on its device, then load its weights, or make them up where `random_weights` asks for it."""
    model = build_model(setup.hf_config, setup.dtype, setup.device)
    if setup.config.random_weights:
        init_random_weights(model, setup.config.seed)
    else:
        load_model(model, setup.path, use_tqdm=setup.config.use_tqdm)
    choose_layers(model, setup)
    return model


def load_part(setup: EngineSetup, group: Group) -> LlamaForCausalLM:
    """A rank's part of the model, with layers that talk to the other ranks. `setup` describes the whole model."""
    from folovllm.distributed.layers import load_sharded_model, parallelize

    model = load_sharded_model(setup, group)
    choose_layers(model, setup)
    parallelize(model, group, setup.vocab_size)
    return model


def attention_layers(model: LlamaForCausalLM) -> list[Attention]:
    """The layers that need a cache and a backend, first to last."""
    return [module for module in model.modules() if isinstance(module, Attention)]


def choose_layers(model: LlamaForCausalLM, setup: EngineSetup) -> None:
    """Layers: compiled where asked for, else fused kernels where attention is a kernel, else plain torch.

    What goes on in a recorded step goes further: there small kernels are what is left to save.
    """
    if setup.config.compile:
        from folovllm.models.compiled import compile_layers

        compile_layers(model)
    elif "triton" in setup.backend or "flash_attn" in setup.backend:
        from folovllm.models.fused import fuse

        fuse(model)
        if setup.config.packed_steps:
            from folovllm.models.fused_layer import fuse_layers

            fuse_layers(model)
