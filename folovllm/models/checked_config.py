"""Refuses a stranger's `config.json` (`fields`) that lacks what every decoder of text has, or would make something too large.

Of a model that has no class here, it says who runs it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from folovllm.models.model_config import num_kv_heads_of
from folovllm.plugins import MODELS

NEEDED = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")
MOST_LAYERS = 10_000
SIZES = ("_size", "_dim", "_heads", "_experts", "_per_tok")  # how fields end that make tensors large


def checked_config(path: Path, fields: dict[str, Any], trust_remote_code: bool) -> Any:
    """Return a folder's PretrainedConfig or its text part. Raises ValueError for bad sizes. Call it within `reading`."""
    for each in (fields, fields.get("text_config")):  # transformers makes lists of this length
        layers = each.get("num_hidden_layers") if isinstance(each, dict) else None
        if isinstance(layers, int) and layers > MOST_LAYERS:
            raise ValueError(f"num_hidden_layers is {layers}, and must be at most {MOST_LAYERS:,}")
    hf_config = text_part(AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code))
    if absent := [name for name in NEEDED if getattr(hf_config, name, None) is None]:
        raise ValueError(f"config.json lacks {', '.join(absent)}: it is not the configuration of a decoder of text")
    if odd := [name for name in NEEDED if not 0 < getattr(hf_config, name) < 2**31]:
        raise ValueError(f"{odd[0]} is {getattr(hf_config, odd[0])}")
    for name, value in vars(hf_config).items():
        is_low = name == "sliding_window" and isinstance(value, int) and value < 0
        if is_low or (name.endswith(SIZES) and isinstance(value, int) and value >= 2**31):
            raise ValueError(f"{name} is {value}")
    heads, kv_heads = hf_config.num_attention_heads, num_kv_heads_of(hf_config)
    if kv_heads < 1 or heads % kv_heads:
        raise ValueError(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    return hf_config


def text_part(hf_config: Any) -> Any:
    """`hf_config.text_config` if an elective has the ForCausalLM class of this architecture, else `hf_config`.

    Such a model reads images as well; the class says which tensors of its checkpoint it leaves out. The architecture's
    name and the quantization go into `text_config`, in place.
    """
    text, names = getattr(hf_config, "text_config", None), getattr(hf_config, "architectures", None) or []
    names = [name.replace("ForConditionalGeneration", "ForCausalLM") for name in names]
    if text is None or MODELS.keys().isdisjoint(names):
        return hf_config
    shared = {"architectures": names, "quantization_config": getattr(hf_config, "quantization_config", None)}
    text.update({name: value for name, value in shared.items() if value is not None})
    return text


def who_runs_it(hf_config: Any) -> str:
    """Return the end of a sentence: it says so if `transformers`, and so M1, has this model."""
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(getattr(hf_config, "model_type", ""))
    known = name in (getattr(hf_config, "architectures", None) or [])
    return '; milestone="m1" runs it, through transformers' if known else ""
