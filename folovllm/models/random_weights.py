"""Random weights, to time a geometry without its checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from folovllm.layers.fusable import fusable
from folovllm.models.extra_tensors import Shard
from folovllm.models.llama import LlamaForCausalLM


def init_random_weights(
    model: LlamaForCausalLM,
    seed: int,
    places: Mapping[str, Any],
    whole: Mapping[str, Any] | None = None,
    shard: Shard | None = None,
) -> None:
    """Fill the model with random weights on its own device, to time a geometry: N(0, 0.02), and ones in the norms.

    `places` are the model's `checkpoint_places`. Where it is a part, `whole` are those of the whole model (of which only
    shapes matter), and `shard` cuts each tensor.
    """
    shard = shard or model.reorder
    device = model.lm_head.weight.device
    generator = torch.Generator(device).manual_seed(seed)
    for name, full in (places if whole is None else whole).items():
        kind, method = name.rpartition(".")[2], fusable(full.linear_method)
        tensor = torch.empty(full.view.shape, dtype=full.view.dtype, device=device)
        if name.endswith("norm.weight"):
            tensor.fill_(1.0)
        else:
            method.fill(kind, tensor, generator)
        if name in places:  # else another rank's
            own = tensor if shard is None else method.shard_filled(kind, tensor, partial(shard, name))
            places[name].view.copy_(own)
    model.weights_loaded()
