"""The sizes of experts, by a model's `config.json`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from folovllm.models.model_config import num_experts_of
from folovllm.models.shapes import Shapes, mlp_shapes

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def expert_shapes(config: PretrainedConfig) -> Shapes:
    """The same of one expert, which stands for all; none in a model without."""
    return mlp_shapes("mlp.experts.0", config.hidden_size, expert_size_of(config)) if num_experts_of(config) else {}


def expert_size_of(config: PretrainedConfig) -> int:
    """Return I, the intermediate size of one expert. Qwen's configs keep it beside a dense MLP's, Mixtral's in its place."""
    return int(getattr(config, "moe_intermediate_size", None) or config.intermediate_size)
