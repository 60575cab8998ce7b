"""Checks of a user's values, and the arguments that vLLM, nano-vLLM or the texts behind this course know beside ours.

Such an argument is taken where it changes nothing, and refused with a sentence elsewhere (`also_takes`). So code that was written
for them runs, or says in one line why it cannot. A name that none of them knows is Python's own TypeError.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from numbers import Integral
from typing import Any, TypeVar

T = TypeVar("T", bound=Callable[..., Any])
Neutral = dict[str, tuple[Any, ...] | None]  # by name, the values that change nothing

ANY = None  # no value changes anything

SAMPLING: Neutral = {
    "best_of": (None, 1),
    "use_beam_search": (None, False),
    "length_penalty": (None, 1),
    "early_stopping": (None, False),
    "guided_decoding": (None,),
    "logits_processors": (None, []),
    "spaces_between_special_tokens": (True,),
}
ENGINE: Neutral = {
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
}
STRUCTURED: Neutral = {
    "disable_fallback": ANY,
    "disable_additional_properties": (False,),
    "structural_tag": (None,),
}
REQUEST: Neutral = {
    "prompt_token_ids": (None,),
    "lora_request": (None,),
    "chat_template_content_format": ("auto", "string"),
    "arrival_time": ANY,
    "trace_headers": ANY,
}
GENERATE: Neutral = {"return_outputs": (True,)}
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


def require(condition: bool, message: str) -> None:
    """Raise a ValueError with `message` if the condition does not hold."""
    if not condition:
        raise ValueError(message)


def is_whole(value: Any) -> bool:
    """Whether it is a whole number of any library's; True and False are none."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def also_takes(neutral: Neutral) -> Callable[[T], T]:
    """Decorate a function, or a class for its constructor, to take the arguments of `neutral` beside its own.

    Raises:
        ValueError: by what is decorated, for one of them whose value would change something.
    """

    def decorate(target: T) -> T:
        inner: Any = target.__init__ if isinstance(target, type) else target  # type: ignore[misc]

        @functools.wraps(inner)
        def outer(*args: Any, **given: Any) -> Any:
            for name in neutral.keys() & given.keys():
                refuse_unless_neutral(name, given.pop(name), neutral[name])
            return inner(*args, **given)

        if not isinstance(target, type):
            return outer  # type: ignore[return-value]
        target.__init__ = outer  # type: ignore[misc]
        return target

    return decorate


def refuse_unless_neutral(name: str, value: Any, neutral: tuple[Any, ...] | None) -> None:
    """Raise ValueError if `value` is none of `neutral`, where some values are."""
    if neutral is not ANY and not any(same is value or same == value for same in neutral):
        raise ValueError(f"{name}={value!r} is not supported here: {INSTEAD.get(name, 'leave it out')}")
