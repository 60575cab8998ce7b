"""What a model's `config.json` says that more than one floor must know."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def head_dim_of(config: PretrainedConfig) -> int:
    """D: as the config says, else the hidden size shared among the heads."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def num_kv_heads_of(config: PretrainedConfig) -> int:
    """Hkv: as the config says, else one for each query head."""
    return int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)


def sliding_window_of(config: PretrainedConfig) -> int | None:
    """How many tokens a layer with a sliding window sees; None if there is no such layer."""
    slides = "sliding_attention" in (getattr(config, "layer_types", None) or ["sliding_attention"])
    return getattr(config, "sliding_window", None) if slides else None


def context_limit(config: PretrainedConfig) -> int:
    """The longest context, in tokens, for which full attention is what the model was trained with.

    Layers with a sliding window see everything as long as the context fits into the window, so the window is the limit.
    """
    limit: int = config.max_position_embeddings
    return min(limit, sliding_window_of(config) or limit)
