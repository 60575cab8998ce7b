"""What the choices of an `EngineConfig` must be, each by itself and all together."""

from __future__ import annotations

from dataclasses import fields
from numbers import Real
from typing import TYPE_CHECKING

from folovllm import builders
from folovllm.require import is_whole

if TYPE_CHECKING:
    from folovllm.config import EngineConfig

CHOICES: dict[str, tuple[str, ...]] = {
    "dtype": ("auto", "float32", "bfloat16", "float16"),
    "model_impl": ("hf", "native"),
    "kv_cache": ("growing", "slots", "paged"),
    "scheduling": ("fcfs", "priority"),
    "kv_cache_dtype": ("auto", "fp8_e4m3"),
}
KINDS = {"str": (str, "a text"), "bool": (bool, "True or False"), "float": (Real, "a number")}  # by annotation
# None: the engine decides
MAY_BE_OPEN = ("max_model_len", "max_num_batched_tokens", "block_size", "num_kv_blocks", "num_threads")
# max_model_len: a token to read and one to write; of what is not named here 1
LEAST = {"long_prefill_token_threshold": 0, "max_logprobs": 0, "max_model_len": 2}
COUNTS = (
    *MAY_BE_OPEN, "max_num_seqs", "kv_cache_memory", "tensor_parallel_size", "long_prefill_token_threshold", "max_n",
    "max_logprobs",
)  # fmt: skip


def check_kinds(config: EngineConfig) -> None:
    """Texts, switches and fractions. Any text is true, so a switch must not be one. ValueError says what a value must be."""
    for own in fields(config):
        kind, _, may_be_open = str(own.type).partition(" | ")
        value, (types, says) = getattr(config, own.name), KINDS.get(kind, (object, ""))
        if not isinstance(value, types) and not (value is None and may_be_open):
            raise ValueError(f"{own.name} must be {says}, not {value!r}")


def check_values(config: EngineConfig) -> None:
    """Raise ValueError for a value out of range."""
    for name, known in CHOICES.items():
        if (value := getattr(config, name)) not in known:
            raise ValueError(f"unknown {name} {value!r}: choose one of {', '.join(known)}")
    for name in COUNTS:
        value, least = getattr(config, name), LEAST.get(name, 1)
        if value is None and name in MAY_BE_OPEN:
            continue
        if not (is_whole(value) and value >= least):
            raise ValueError(f"{name} must be at least {least} (a whole number), not {value!r}")
    if not is_whole(config.seed) or not 0 <= config.seed < 2**63:
        raise ValueError(f"seed must be a whole number between 0 and 2**63 - 1, not {config.seed!r}")
    if not 0 < config.gpu_memory_utilization <= 1:
        raise ValueError(f"gpu_memory_utilization must be above 0 and at most 1, not {config.gpu_memory_utilization}")


def check_combinations(config: EngineConfig) -> None:
    """Raise ValueError for two choices that do not fit together; the sentence says what does."""
    if config.model_impl == "hf" and config.kv_cache != "growing":
        raise ValueError('model_impl="hf" keeps its own growing cache: use milestone="m1", or model_impl="native"')
    if config.kv_cache == "growing" and config.scheduling != "fcfs":
        raise ValueError('kv_cache="growing" serves in the order of arrival: leave scheduling at "fcfs", or use "m2"')
    if config.kv_cache == "growing" and config.max_num_seqs != 1:
        raise ValueError('kv_cache="growing" serves one request at a time: leave max_num_seqs at 1, or use "m2"')
    if config.kv_cache == "growing" and config.kv_cache_dtype != "auto":
        raise ValueError(
            'kv_cache="growing" keeps K/V in the dtype of the model: leave kv_cache_dtype out, or use "m2"'
        )
    if config.calculate_kv_scales and config.kv_cache_dtype == "auto":
        raise ValueError('calculate_kv_scales is of use with kv_cache_dtype="fp8_e4m3" only')
    if config.enable_prefix_caching and config.kv_cache != "paged":
        raise ValueError('enable_prefix_caching needs blocks: kv_cache="paged", as from milestone m3 on')
    if config.enable_chunked_prefill and config.kv_cache == "growing":
        raise ValueError("enable_chunked_prefill needs batches: take milestone m2 or later")
    if config.packed_steps and config.kv_cache != "paged":
        raise ValueError(
            'CUDA graphs, async_scheduling and tensor_parallel_size need kv_cache="paged", as from milestone m3 on'
        )
    if config.compile and config.model_impl == "hf":
        raise ValueError('compile needs model_impl="native": it is our layers that are compiled')
    if config.random_weights and config.model_impl == "hf":
        raise ValueError('random_weights needs model_impl="native"')
    if config.quantize_activations and config.model_impl == "hf":
        raise ValueError('quantize_activations needs model_impl="native"')
    if config.count_experts and config.kv_cache == "growing":
        raise ValueError("count_experts needs batches: take milestone m2 or later")
    if config.speculative_config is not None and config.kv_cache == "growing":
        raise ValueError("speculative_config needs steps of several tokens: take milestone m2 or later")
    if config.speculative_config is not None and "scheduler" in builders.chosen(config):
        raise ValueError("speculative_config needs the engine's own scheduler: leave it out of builders")
    builders.check(config)
