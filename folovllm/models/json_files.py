"""Read the JSON files of a model's folder, and say what is wrong with them before anything builds on them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from folovllm.require import is_whole

DTYPES = ("float64", "float32", "float16", "bfloat16")


class Kind(NamedTuple):
    """What a field may hold, in words and as a test."""

    says: str
    fits: Callable[[Any], bool]


def _is_number(value: Any) -> bool:
    return is_whole(value) or (isinstance(value, float) and math.isfinite(value))


def _is_list_of(kind: type, value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, kind) for item in value)


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


OBJECT = Kind("an object {...}", lambda value: isinstance(value, dict))
SIZE = Kind("a whole number of at least 1", lambda value: is_whole(value) and 1 <= value < 2**31)
SIZES = Kind(
    "a whole number of at least 1, or a list of them",
    lambda value: value != [] and all(map(SIZE.fits, _as_list(value))),
)
WINDOW = Kind("a whole number, 0 for none", lambda value: is_whole(value) and 0 <= value < 2**31)
INDEX = Kind("a whole number of at least 0", lambda value: is_whole(value) and 0 <= value < 2**31)
LAYERS = Kind("a whole number from 1 to 10,000", lambda value: is_whole(value) and 1 <= value <= 10_000)
ABOVE_0 = Kind("a number above 0", lambda value: _is_number(value) and 0 < value < 2**63)
NUMBER = Kind("a number", lambda value: is_whole(value) or isinstance(value, float))
SWITCH = Kind("true or false", lambda value: isinstance(value, bool))
TEXT = Kind("a text", lambda value: isinstance(value, str))
TEXTS = Kind("a list of texts", lambda value: _is_list_of(str, value))
DTYPE = Kind(f"one of {', '.join(DTYPES)}", lambda value: value in DTYPES)
OBJECTS = Kind("a list of objects", lambda value: _is_list_of(dict, value))
TOKEN = Kind("a text or an object", lambda value: isinstance(value, str | dict))
TEMPLATE = Kind("a text or a list of objects", lambda value: isinstance(value, str) or _is_list_of(dict, value))
IDS = Kind("a token id or a list of them", lambda value: all(map(is_whole, _as_list(value))))

ROPE = {
    "rope_type": TEXT, "type": TEXT, "rope_theta": ABOVE_0, "factor": ABOVE_0, "low_freq_factor": ABOVE_0,
    "high_freq_factor": ABOVE_0, "original_max_position_embeddings": SIZE, "partial_rotary_factor": ABOVE_0,
    "beta_fast": ABOVE_0, "beta_slow": ABOVE_0, "attention_factor": ABOVE_0, "mscale": ABOVE_0, "mscale_all_dim": ABOVE_0,
    "truncate": SWITCH,
}  # fmt: skip
FIELDS: dict[str, dict[str, Kind]] = {  # what is read of each file, here or in transformers; null is as good as absent
    "config.json": {
        "architectures": TEXTS, "model_type": TEXT, "dtype": DTYPE, "torch_dtype": DTYPE, "vocab_size": SIZE,
        "hidden_size": SIZE, "intermediate_size": SIZES, "num_hidden_layers": LAYERS, "num_attention_heads": SIZE,
        "num_key_value_heads": SIZE, "head_dim": SIZE, "max_position_embeddings": SIZE, "rms_norm_eps": ABOVE_0,
        "hidden_act": TEXT, "hidden_activation": TEXT, "query_pre_attn_scalar": ABOVE_0, "sliding_window_pattern": SIZE,
        "tie_word_embeddings": SWITCH, "attention_bias": SWITCH, "mlp_bias": SWITCH,
        "sliding_window": WINDOW, "layer_types": TEXTS, "rope_theta": ABOVE_0, "rope_local_base_freq": ABOVE_0,
        "rope_scaling": OBJECT,
        "rope_parameters": OBJECT, "partial_rotary_factor": ABOVE_0, "eos_token_id": IDS,
        "quantization_config": OBJECT, "bos_token_id": IDS, "pad_token_id": IDS, "use_sliding_window": SWITCH,
        "original_max_position_embeddings": SIZE, "num_experts": INDEX, "num_local_experts": INDEX,
        "num_experts_per_tok": SIZE, "moe_intermediate_size": SIZE, "shared_expert_intermediate_size": INDEX,
        "norm_topk_prob": SWITCH, "decoder_sparse_step": SIZE, "mlp_only_layers": IDS,
    },
    "generation_config.json": {"eos_token_id": IDS},
    "tokenizer.json": {"model": OBJECT, "added_tokens": OBJECTS},
    "tokenizer_config.json": {
        "chat_template": TEMPLATE, "eos_token": TOKEN, "tokenizer_class": TEXT, "added_tokens_decoder": OBJECT,
        "model_max_length": NUMBER,
    },
    "special_tokens_map.json": {"eos_token": TOKEN},
    "added_tokens.json": {},
    "model.safetensors.index.json": {"weight_map": OBJECT},
}  # fmt: skip


def read_json(file: Path) -> dict[str, Any]:
    """Read the object in a JSON file, and check that each known field is of its kind.

    Raises:
        ValueError: it is not; the sentence names file and field.
        OSError: the file cannot be opened.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except RecursionError as error:
        raise ValueError(f"{file.name} is nested too deeply") from error
    except ValueError as error:
        raise ValueError(f"{file.name} is no JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file.name} must hold an object {{...}}, not {_short(content)}")
    check_content(file.name, content)
    return content


def check_content(name: str, content: dict[str, Any]) -> None:
    """Raise ValueError at the first known field of the file `name` that is not of its kind."""
    check_fields(name, content, FIELDS[name])
    check_fields(f"{name}: quantization_config", content.get("quantization_config") or {}, {"quant_method": TEXT})
    for field in ("rope_scaling", "rope_parameters"):
        given = content.get(field) or {}
        check_fields(f"{name}: {field}", given, ROPE, may_be_null=False)
        for kind, own in given.items():  # Gemma's, one for each kind of layers
            if isinstance(own, dict):
                check_fields(f"{name}: {field}: {kind}", own, ROPE, may_be_null=False)


def check_fields(where: str, content: dict[str, Any], kinds: dict[str, Kind], may_be_null: bool = True) -> None:
    """Raise ValueError at the first field that is not of its kind."""
    if not isinstance(content, dict):
        raise ValueError(f"{where} is {_short(content)}, and must be {OBJECT.says}")
    for name, kind in kinds.items():
        if name not in content or (may_be_null and content[name] is None):
            continue
        if not kind.fits(content[name]):
            raise ValueError(f"{where}: {name} is {_short(content[name])}, and must be {kind.says}")


def _short(value: Any) -> str:
    """Return the beginning of a value, as JSON writes it, for a sentence."""
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
