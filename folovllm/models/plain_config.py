"""The configuration of a model of a plain kind, from `config.json` alone.

transformers needs up to 6 s to be imported and to read such a file. It is asked wherever the file leaves something out, or
something in it follows a rule that only transformers knows.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from folovllm.model_config import FULL

KINDS = ("llama", "qwen3")
NEEDED = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "hidden_act", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings",
)  # fmt: skip
WITH_RULES = (
    "rope_scaling", "partial_rotary_factor", "sliding_window", "use_sliding_window", "quantization_config",
    "attention_dropout", "auto_map",
)  # fmt: skip


class PlainConfig(SimpleNamespace):
    """The fields that the engine reads of a `PretrainedConfig`, under the same names."""

    def to_dict(self) -> dict[str, Any]:
        """All fields."""
        return dict(vars(self))


def plain_config(fields: dict[str, Any]) -> PlainConfig | None:
    """What the fields of a `config.json` say; None if it takes transformers to know that."""
    said = fields.get("rope_parameters") or {"rope_theta": fields.get("rope_theta")}
    rope = {"rope_type": "default", **said}
    all_full = [FULL] * (fields.get("num_hidden_layers") or 0)
    is_plain = (
        fields.get("model_type") in KINDS
        and all(fields.get(name) is not None for name in NEEDED)
        and not any(fields.get(name) for name in WITH_RULES)
        and (fields.get("layer_types") or all_full) == all_full
        and rope.keys() == {"rope_type", "rope_theta"}
        and rope["rope_type"] == "default"
        and rope["rope_theta"] is not None
        and fields["hidden_size"] % fields["num_attention_heads"] == 0
        and ("eos_token_id" in fields or fields["model_type"] != "llama")  # a Llama's would be 2
    )
    return PlainConfig(**fields | {"rope_parameters": rope}) if is_plain else None
