"""The shapes of a model's matrices, by its `config.json`, before a weight is read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from folovllm.models.model_config import UnsupportedModel, head_dim_of, num_experts_of, num_kv_heads_of
from folovllm.models.registry import get_model_class

if TYPE_CHECKING:
    from transformers import PretrainedConfig

Shapes = dict[str, tuple[int, int]]  # [outputs, inputs] of linear layers, by their names within a decoder layer


def linear_shapes(config: PretrainedConfig) -> Shapes:
    """[outputs, inputs] of the linear layers of a decoder layer that each token is multiplied by, by their names."""
    hidden, head_dim = config.hidden_size, head_dim_of(config)
    query, kv = config.num_attention_heads * head_dim, num_kv_heads_of(config) * head_dim
    shapes = {"q_proj": (query, hidden), "k_proj": (kv, hidden), "v_proj": (kv, hidden), "o_proj": (hidden, query)}
    attention = {f"self_attn.{name}": shape for name, shape in shapes.items()}
    if not num_experts_of(config):
        return attention | mlp_shapes("mlp", hidden, config.intermediate_size)
    attention["mlp.gate"] = (num_experts_of(config), hidden)
    if shared := getattr(config, "shared_expert_intermediate_size", None):
        attention |= {"mlp.shared_expert_gate": (1, hidden), **mlp_shapes("mlp.shared_expert", hidden, shared)}
    return attention


def mlp_shapes(prefix: str, hidden: int, inner: int) -> Shapes:
    """The three matrices of an MLP."""
    shapes = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    return {f"{prefix}.{name}": shape for name, shape in shapes.items()}


def renamed_by(hf_config: PretrainedConfig) -> Mapping[str, str]:
    """Parts of names in the model's checkpoints: what they are called here. None of an unknown model."""
    try:
        return get_model_class(hf_config).renamed
    except UnsupportedModel:  # `build_model` says so
        return {}
