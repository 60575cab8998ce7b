"""Our model with its weights, and its attention layers in order."""

from __future__ import annotations

from functools import partial

from folovllm.distributed.group import Group
from folovllm.distributed.sharding import local_config, shard_named
from folovllm.engine.setup import EngineSetup
from folovllm.layers.attention import Attention
from folovllm.layers.layer_set import LayerSet
from folovllm.model_config import head_dim_of
from folovllm.models.llama import LlamaForCausalLM
from folovllm.models.loader import init_random_weights, load_model
from folovllm.models.registry import build_model
from folovllm.sample.sampler import Sampler


def choose_layer_set(setup: EngineSetup, group: Group | None = None) -> LayerSet:
    """Layers: compiled where asked for, else fused kernels where attention is a kernel, else plain torch.

    What goes on in a recorded step goes further: there small kernels are what is left to save. With a group, those of
    one rank among several.
    """
    layers = LayerSet()
    if setup.config.compile:
        from folovllm.layers.compiled import compiled_layers

        layers = compiled_layers()
    elif "triton" in setup.backend or "flash_attn" in setup.backend:
        from folovllm.models.fused import fused_layers
        from folovllm.models.fused_layer import few_token_layers

        layers = (few_token_layers if setup.config.packed_steps else fused_layers)(setup.attention.head_dim)
    if group is None:
        return layers
    from folovllm.layers.sharded import sharded

    return sharded(layers, group, setup.vocab_size)


def load_native_model(setup: EngineSetup) -> LlamaForCausalLM:
    """Build the model on its device, then load its weights, or make them up where `random_weights` asks for it."""
    model = build_model(setup.hf_config, setup.dtype, setup.device, setup.max_model_len, choose_layer_set(setup))
    if setup.config.random_weights:
        init_random_weights(model, setup.config.seed)
    else:
        load_model(model, setup.path, use_tqdm=setup.config.use_tqdm)
    return model


def load_sharded_model(setup: EngineSetup, group: Group) -> LlamaForCausalLM:
    """The rank's part of the model with its weights; of the checkpoint only this part is read.

    `setup` describes the whole model; random weights are those of one rank, cut.
    """
    config = local_config(setup.hf_config, group.size)
    shard = partial(shard_named, head_dim=head_dim_of(setup.hf_config), rank=group.rank, size=group.size)
    model = build_model(config, setup.dtype, setup.device, setup.max_model_len, choose_layer_set(setup, group))
    if setup.config.random_weights:
        whole = build_model(setup.hf_config, setup.dtype, "meta", setup.max_model_len, choose_layer_set(setup))
        init_random_weights(model, setup.config.seed, whole, shard)
    else:
        load_model(model, setup.path, use_tqdm=setup.config.use_tqdm and group.rank == 0, shard=shard)
    return model


def attention_layers(model: LlamaForCausalLM) -> list[Attention]:
    """The layers that need a cache and a backend, first to last."""
    return [module for module in model.modules() if isinstance(module, Attention)]


def make_sampler(setup: EngineSetup) -> Sampler:
    """The draw, compiled where asked for."""
    if setup.config.compile:
        from folovllm.sample.compiled import CompiledSampler

        return CompiledSampler()
    return Sampler()
