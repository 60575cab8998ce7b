"""A rank's part of a model, from its part of the checkpoint alone."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

from folovllm.distributed.group import ProcessGroup
from folovllm.distributed.sharding import local_config, shard_merged, shard_named
from folovllm.engine.setup import EngineSetup
from folovllm.layers.layer_set import LayerSet
from folovllm.layers.sharded import sharded
from folovllm.models.llama import LlamaForCausalLM
from folovllm.models.loader import Tensors, built, checkpoint_places, load_model
from folovllm.models.model_config import head_dim_of
from folovllm.models.random_weights import init_random_weights
from folovllm.models.registry import PLAIN_LAYERS, build_model, get_model_class
from folovllm.plugins import EXPERTS, load_elective


def load_sharded_model(
    setup: EngineSetup,
    group: ProcessGroup,
    layers: LayerSet = PLAIN_LAYERS,
    into: LlamaForCausalLM | None = None,
    weights: Path | Tensors | None = None,
) -> LlamaForCausalLM:
    """Build the rank's part of the model, then load its weights. Only this part of the checkpoint is read.

    `setup` and `layers` are those of the whole model. Random weights are sharded too: they do not depend on the number of ranks.
    """
    expert_parallel = bool(setup.config.extras.get("enable_expert_parallel"))
    config = local_config(setup.hf_config, group.size, expert_parallel)
    shard = partial(shard_named, head_dim=head_dim_of(setup.hf_config), rank=group.rank, size=group.size)
    shard = partial(shard_merged, hf_config=setup.hf_config, shard=shard)
    if (of_family := get_model_class(setup.hf_config).shard) is not None:  # `usual` cuts what all families have
        shard = partial(of_family, setup.hf_config, rank=group.rank, size=group.size, usual=shard)
    if expert_parallel:
        shard = partial(load_elective(EXPERTS, "enable_expert_parallel").keep_experts_whole, shard=shard)
    part = sharded(layers, group, setup.vocab_size)
    model = into or built(setup, config, part)
    if setup.config.random_weights and weights is None:
        whole = build_model(setup.hf_config, setup.dtype, "meta", setup.max_model_len, replace(layers, counters=None))
        init_random_weights(model, setup.config.seed, checkpoint_places(model), checkpoint_places(whole), shard)
    else:
        show = setup.config.use_tqdm and group.rank == 0 and into is None
        load_model(model, setup.path if weights is None else weights, use_tqdm=show, shard=shard)
    return model
