"""Which models run: the registry is asked to build each, on the `meta` device, and its own answer is what the page says."""

from __future__ import annotations

import re

import torch
from transformers import AutoConfig

from folovllm.models.registry import build_model

SMALL = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "pad_token_id": 0,
}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
LINEAR = {"rope_type": "linear", "factor": 2.0}
LONG = {
    "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8,
    "original_max_position_embeddings": 4096,
}  # fmt: skip
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0}
HYBRID = {
    "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 1,
    "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip

# what people call it, what its config.json says: model_type, architecture, and what is special about it
MODELS = (
    ("Llama 2, SmolLM2, TinyLlama", "llama", "LlamaForCausalLM", {}),
    ("Llama 3, 3.1, 3.2", "llama", "LlamaForCausalLM", {"rope_parameters": LLAMA3 | {"rope_theta": 5e5}}),
    ("Mistral 7B", "mistral", "MistralForCausalLM", {"sliding_window": 4096}),
    ("Qwen2, Qwen2.5", "qwen2", "Qwen2ForCausalLM", {}),
    ("Qwen3", "qwen3", "Qwen3ForCausalLM", {}),
    ("any of these with YaRN", "qwen3", "Qwen3ForCausalLM", {"rope_parameters": YARN | {"rope_theta": 1e6}}),
    ("with linear RoPE scaling", "llama", "LlamaForCausalLM", {"rope_parameters": LINEAR | {"rope_theta": 1e4}}),
    ("with dynamic RoPE scaling", "llama", "LlamaForCausalLM", {"rope_parameters": DYNAMIC | {"rope_theta": 1e4}}),
    (
        "quantized: FP8, INT8 (compressed-tensors)",
        "qwen3",
        "Qwen3ForCausalLM",
        {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}},
    ),
    ("Mixtral", "mixtral", "MixtralForCausalLM", {}),
    ("Qwen2-MoE", "qwen2_moe", "Qwen2MoeForCausalLM", {}),
    ("Qwen3-MoE", "qwen3_moe", "Qwen3MoeForCausalLM", {}),
    ("Qwen3-Next", "qwen3_next", "Qwen3NextForCausalLM", HYBRID | {"num_experts": 2, "num_experts_per_tok": 1}),
    ("Qwen3.5 (text)", "qwen3_5_text", "Qwen3_5ForCausalLM", HYBRID),
    (
        "Qwen3.5-MoE (text)",
        "qwen3_5_moe_text",
        "Qwen3_5MoeForCausalLM",
        HYBRID | {"num_experts": 2, "num_experts_per_tok": 1},
    ),
    ("Llama 4", "llama4_text", "Llama4ForCausalLM", {}),
    ("Gemma 3 (text)", "gemma3_text", "Gemma3ForCausalLM", {}),
    ("Phi-3, Phi-4", "phi3", "Phi3ForCausalLM", {}),
    ("with LongRoPE (Phi-3's 128k, Phi-4-mini)", "phi3", "Phi3ForCausalLM", {"rope_parameters": LONG}),
)


def model_table() -> str:
    """A row for each of `MODELS`."""
    rows = ["| model | architecture | M2 to M6, and M1 with our layers |", "|---|---|---|"]
    for name, model_type, architecture, special in MODELS:
        rows.append(f"| {name} | `{architecture}` | {answer(model_type, architecture, special)} |")
    return "\n".join(rows)


def answer(model_type: str, architecture: str, special: dict[str, object]) -> str:
    """ "yes", or "no: " and the sentence with which the registry refuses the model."""
    config = AutoConfig.for_model(model_type, **(SMALL | special))
    config.architectures = [architecture]
    try:
        build_model(config, torch.float32, "meta", max_model_len=64)
    except ValueError as error:
        return f"no: {re.split('; |: the known', str(error))[0]}"
    return "yes"
