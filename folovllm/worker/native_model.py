"""Our model with its weights, and its attention layers in order."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from folovllm.distributed.group import Group
from folovllm.distributed.sharding import keep_experts_whole, local_config, shard_merged, shard_named
from folovllm.layers.attention import Attention
from folovllm.layers.layer_set import LayerSet
from folovllm.layers.sharded import sharded
from folovllm.model_config import head_dim_of
from folovllm.models.llama import LlamaForCausalLM
from folovllm.models.loader import init_random_weights, load_model
from folovllm.models.registry import PLAIN_LAYERS, build_model
from folovllm.setup import EngineSetup


def load_native_model(setup: EngineSetup, layers: LayerSet = PLAIN_LAYERS) -> LlamaForCausalLM:
    """Build the model on its device, then load its weights, or make them up where `random_weights` asks for it."""
    model = build_model(setup.hf_config, setup.dtype, setup.device, setup.max_model_len, layers)
    if setup.config.random_weights:
        init_random_weights(model, setup.config.seed)
    else:
        load_model(model, setup.path, use_tqdm=setup.config.use_tqdm)
    return model


def load_sharded_model(setup: EngineSetup, group: Group, layers: LayerSet = PLAIN_LAYERS) -> LlamaForCausalLM:
    """The rank's part of the model with its weights; of the checkpoint only this part is read.

    `setup` and `layers` are those of the whole model; random weights are those of one rank, cut.
    """
    expert_parallel = setup.config.enable_expert_parallel
    config = local_config(setup.hf_config, group.size, expert_parallel)
    shard = partial(shard_named, head_dim=head_dim_of(setup.hf_config), rank=group.rank, size=group.size)
    shard = partial(shard_merged, hf_config=setup.hf_config, shard=shard)
    if expert_parallel:
        shard = partial(keep_experts_whole, shard=shard)
    part = sharded(layers, group, setup.vocab_size)
    model = build_model(config, setup.dtype, setup.device, setup.max_model_len, part)
    if setup.config.random_weights:
        whole = build_model(setup.hf_config, setup.dtype, "meta", setup.max_model_len, replace(layers, counters=None))
        init_random_weights(model, setup.config.seed, whole, shard)
    else:
        load_model(model, setup.path, use_tqdm=setup.config.use_tqdm and group.rank == 0, shard=shard)
    return model


def attention_layers(model: LlamaForCausalLM) -> list[Attention]:
    """The layers that need a cache and a backend, first to last."""
    return [module for module in model.modules() if isinstance(module, Attention)]
