"""The scales of an FP8 KV cache that a checkpoint may have."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import cast

import torch

from folovllm.models.extra_tensors import WeightLoader
from folovllm.models.llama import LlamaDecoderLayer, LlamaForCausalLM

# As compressed-tensors, vLLM, ModelOpt and older quantizers name them.
NAME = re.compile(r"model\.layers\.(\d+)\.self_attn\.(?:(?:attn\.|[kv]_proj\.)?([kv])_scale|([kv])_proj\.output_scale)")


def weight_loader_of(name: str) -> WeightLoader | None:
    """Return `load_kv_scale` if the tensor is a scale of the KV cache, else None (a hook of `folovllm.plugins`)."""
    return load_kv_scale if NAME.fullmatch(name) else None


def load_kv_scale(model: LlamaForCausalLM, name: str, tensor: torch.Tensor) -> None:
    """Set a scale of the KV cache in its attention layer.

    Raises:
        ValueError: it is not one positive number, or there is no such layer.
    """
    match = NAME.fullmatch(name)
    assert match is not None
    layer, is_key = int(match[1]), (match[2] or match[3]) == "k"
    if layer >= len(model.model.layers):
        raise ValueError(f"the weights hold {name!r}, for which the model has no place")
    if tensor.numel() != 1 or not 0 < tensor.item() < float("inf"):
        raise ValueError(f"{name!r} must be one positive number: scales of single heads are not supported")
    attention = cast(LlamaDecoderLayer, model.model.layers[layer]).self_attn.attn
    scales, scale = attention.scales, tensor.item()
    attention.scales = replace(scales, key=scale) if is_key else replace(scales, value=scale)
