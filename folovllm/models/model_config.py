"""What a model's `config.json` says that several packages must know."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PretrainedConfig

SLIDING, FULL, LINEAR = "sliding_attention", "full_attention", "linear_attention"  # kinds of layers


class UnsupportedModel(ValueError):
    """A valid configuration asks for something that no layer here has. The message names it."""


def head_dim_of(config: PretrainedConfig) -> int:
    """D: as the config says, else the hidden size shared among the heads."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def num_kv_heads_of(config: PretrainedConfig) -> int:
    """Hkv: as the config says, else one for each query head."""
    return int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)


def num_experts_of(config: PretrainedConfig) -> int:
    """E: the experts of a layer; 0 in a model without."""
    return int(getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None) or 0)


def hidden_act_of(config: PretrainedConfig) -> str | None:
    """The name of the MLP's activation. Gemma's configs have another word for it."""
    return getattr(config, "hidden_act", None) or getattr(config, "hidden_activation", None)


def windows_of(config: PretrainedConfig) -> list[int | None]:
    """How many tokens a token sees in each layer, itself included; None: all before it. Raises ValueError for another kind of layer.

    `layer_types` says which layers slide. Without it all do, if `sliding_window` is given.
    """
    window, count = getattr(config, "sliding_window", None) or None, config.num_hidden_layers
    kinds = (getattr(config, "layer_types", None) or [SLIDING] * count)[:count]
    if unknown := sorted({*kinds} - {SLIDING, FULL, LINEAR}):
        raise ValueError(f"layers of type {', '.join(unknown)} are not supported: only {SLIDING}, {FULL} and {LINEAR}")
    return [window if kind == SLIDING else None for kind in kinds]


def num_linear_of(config: PretrainedConfig) -> int:
    """Layers of linear attention. They keep a state for each sequence, and no K/V."""
    kinds: list[str] = getattr(config, "layer_types", None) or []
    return kinds[: config.num_hidden_layers].count(LINEAR) if kinds else 0


def window_of(config: PretrainedConfig) -> int | None:
    """The largest window of the model's layers; None where one of them sees all."""
    windows = windows_of(config)
    return None if None in windows else max(window for window in windows if window is not None)


def rope_parameters(config: PretrainedConfig) -> dict[str, Any]:
    """`rope_theta`, `rope_type` and what else the type needs, as transformers 5 keeps them, or as transformers 4 did."""
    modern: dict[str, Any] | None = getattr(config, "rope_parameters", None)
    scaling: dict[str, Any] = getattr(config, "rope_scaling", None) or {}
    return modern or {"rope_theta": getattr(config, "rope_theta", 10000.0), **scaling}


def rope_kind(config: PretrainedConfig) -> str:
    """How the angles of RoPE are scaled; "default": not at all."""
    parameters = rope_parameters(config)
    return str(parameters.get("rope_type", parameters.get("type", "default")))


def num_positions(config: PretrainedConfig) -> int:
    """The longest context, in tokens: what the config says, and under YaRN at least `factor` times the first training's."""
    limit, parameters = int(config.max_position_embeddings), rope_parameters(config)
    if rope_kind(config) != "yarn":
        return limit
    return max(limit, int(parameters.get("original_max_position_embeddings", 0) * parameters["factor"]))
