"""What a benchmark compares: presets with their settings, over a model or over random weights of some shape."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from folovllm.config import DEFAULT_MODEL, EngineConfig

Contender = tuple[str, dict[str, Any]]  # a name, and fields of EngineConfig

QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 1024, "num_hidden_layers": 28,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 3072, "vocab_size": 151_936,
    "tie_word_embeddings": True, "max_position_embeddings": 40_960, "rope_theta": 1_000_000.0, "rms_norm_eps": 1e-6,
    "hidden_act": "silu", "torch_dtype": "bfloat16",
}  # fmt: skip
LARGER = {"num_hidden_layers": 36, "num_attention_heads": 32}
GEOMETRIES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": QWEN3,
    "qwen3-4b": QWEN3 | LARGER | {"hidden_size": 2560, "intermediate_size": 9728},
    "qwen3-8b": QWEN3 | LARGER | {"hidden_size": 4096, "intermediate_size": 12288, "tie_word_embeddings": False},
    "llama-3.2-1b": QWEN3 | {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 2048, "num_hidden_layers": 16,
        "num_attention_heads": 32, "head_dim": 64, "intermediate_size": 8192, "vocab_size": 128_256,
        "rope_theta": 500_000.0, "rms_norm_eps": 1e-5,
    },
    "qwen3-30b-a3b": QWEN3 | {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 48,
        "num_attention_heads": 32, "num_key_value_heads": 4, "intermediate_size": 6144, "moe_intermediate_size": 768,
        "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True, "tie_word_embeddings": False,
    },
    "qwen3.5-9b": {
        "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "hidden_size": 4096, "num_hidden_layers": 32,
        "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 256, "intermediate_size": 12288, "vocab_size": 248_320,
        "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 8,
        "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4, "rope_theta": 10_000_000.0, "partial_rotary_factor": 0.25, "rms_norm_eps": 1e-6,
        "hidden_act": "silu", "tie_word_embeddings": False, "max_position_embeddings": 262_144, "torch_dtype": "bfloat16",
    },
}  # fmt: skip
GEOMETRIES["qwen3-next-9b"] = GEOMETRIES["qwen3.5-9b"] | {  # the same sizes in a form that vLLM runs without an image encoder
    "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "num_experts": 0,
}  # fmt: skip


def random_model(name: str, folder: Path, common: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of an EngineConfig that runs a geometry with random weights, and write the model's configuration to `folder`.

    The embedded model's tokenizer decodes its text.

    Raises:
        ValueError: no such geometry; the sentence lists those there are.
    """
    if name not in GEOMETRIES:
        raise ValueError(f"unknown geometry {name!r}: choose one of {', '.join(GEOMETRIES)}")
    model = folder / name
    model.mkdir()
    (model / "config.json").write_text(json.dumps(GEOMETRIES[name], indent=1), encoding="utf-8")
    own = {"model": str(model), "random_weights": True}
    return {"tokenizer": DEFAULT_MODEL, "model_impl": "native"} | common | own


def used_settings(config: EngineConfig) -> dict[str, Any]:
    """Return the fields that are set, for a result file. With random weights the model is named after its geometry."""
    given = asdict(config)
    settings = {key: value for key, value in (given | given.pop("extras")).items() if value is not None}
    return settings | {"model": Path(config.model).name} if config.random_weights else settings


def parse_contenders(text: str, common: dict[str, Any]) -> list[Contender]:
    """ "m1,m2:max_num_seqs=8" -> a name and the fields of an EngineConfig for each; `common` goes to all.

    Raises:
        ValueError: an item is no milestone with settings behind colons, or the configuration refuses it.
    """
    contenders = []
    for item in map(str.strip, text.split(",")):
        milestone, *settings = item.split(":")
        pairs = [setting.partition("=") for setting in settings]
        if not milestone or not all(equals for _, equals, _ in pairs):
            raise ValueError(
                f"--compare takes milestones with settings behind them, say m1,m2:max_num_seqs=8, not {text!r}"
            )
        fields = common | {"milestone": milestone}
        for key, _, value in pairs:
            fields[key] = value
            with suppress(ValueError):
                fields[key] = json.loads(value)
        try:
            EngineConfig(**fields)
        except TypeError as error:
            raise ValueError(f"{item!r} in --compare names a setting that there is not: {error}") from error
        contenders.append((item, fields))
    return contenders
