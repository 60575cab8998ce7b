"""The arguments that vLLM, nano-vLLM or the texts behind this course know beside ours.

Such an argument is taken where it changes nothing, and refused with a sentence elsewhere (`require.takes_vllm_arguments`). This is imported
when somebody passes one. A name that none of them knows is Python's own TypeError.
"""

from __future__ import annotations

from typing import Any

Neutral = dict[str, tuple[Any, ...] | None]  # by name, the values that change nothing

ANY = None  # no value changes anything

TABLES: dict[str, Neutral] = {  # by who takes the arguments
    "sampling": {
        "best_of": (None, 1),
        "use_beam_search": (None, False),
        "length_penalty": (None, 1),
        "early_stopping": (None, False),
        "guided_decoding": (None,),
        "logits_processors": (None, []),
        "spaces_between_special_tokens": (True,),
    },
    "engine": {
        "quantization_config": (None,),
        "load_format": ("auto", "safetensors"),
        "download_dir": (None,),
        "revision": (None, "main"),
        "tokenizer_revision": (None, "main"),
        "tokenizer_mode": ("auto", "hf"),
        "skip_tokenizer_init": (False,),
        "hf_overrides": (None, {}),
        "hf_token": (None,),
        "generation_config": ("auto",),
        "override_generation_config": (None, {}),
        "chat_template": (None,),
        "runner": ("auto", "generate"),
        "task": ("auto", "generate"),
        "convert": ("auto", "none"),
        "cpu_offload_gb": (0,),
        "kv_cache_memory_bytes": (None,),
        "num_gpu_blocks_override": (None,),
        "pipeline_parallel_size": (1,),
        "data_parallel_size": (1,),
        "distributed_executor_backend": (None, "mp", "uni"),
        "structured_outputs_config": (None, {}),
        "compilation_config": (None, {}),
        "scheduling_policy": ("fcfs",),
        "enable_lora": (False,),
        "logits_processors": (None, []),
        "logprobs_mode": ("raw_logprobs",),
        "limit_mm_per_prompt": (None, {}),
        "swap_space": ANY,
        "served_model_name": ANY,
        "disable_log_stats": ANY,
        "disable_log_requests": ANY,
        "disable_custom_all_reduce": ANY,
        "kvcache_block_size": (),
        "num_kvcache_blocks": (-1,),
        "max_seq_len_to_capture": ANY,
        "use_v2_block_manager": ANY,
    },
    "structured": {"disable_fallback": ANY, "disable_additional_properties": (False,), "structural_tag": (None,)},
    "request": {
        "prompt_token_ids": (None,),
        "lora_request": (None,),
        "chat_template_content_format": ("auto", "string"),
        "arrival_time": ANY,
        "trace_headers": ANY,
    },
    "generate": {"return_outputs": (True,)},
    "beams": {"temperature": (0,), "include_stop_str_in_output": (False,), "structured_outputs": (None,)},
}
INSTEAD = {  # what to say in place of "leave it out"
    "prompt_token_ids": "a prompt is a text or a list of token ids",
    "best_of": "ask for n answers with logprobs=0, and choose by cumulative_logprob",
    "guided_decoding": "say structured_outputs",
    "disable_additional_properties": 'say "additionalProperties": false in the schema',
    "use_beam_search": "call LLM.beam_search",
    "kv_cache_memory_bytes": "say kv_cache_memory (on a CPU), or gpu_memory_utilization",
    "num_gpu_blocks_override": "say num_kv_blocks",
    "kvcache_block_size": "say block_size",
    "num_kvcache_blocks": "say num_kv_blocks",
    "scheduling_policy": "say scheduling",
    "chat_template": "hand it to chat",
}


def drop_neutral(table: str, given: dict[str, Any]) -> None:
    """Take the arguments of a table out of `given`. Raises ValueError for one whose value would change something."""
    for name in TABLES[table].keys() & given.keys():
        value, neutral = given.pop(name), TABLES[table][name]
        if neutral is not ANY and not any(same is value or same == value for same in neutral):
            raise ValueError(f"{name}={value!r} is not supported here: {INSTEAD.get(name, 'leave it out')}")
