"""How the parts of M2 to M5 are chosen: what serves a batch.

In some places a class that a learner wrote can stand (`folovllm.learn.builders`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from folovllm.attention.backends.abstract import AttentionBackend
from folovllm.attention.backends.registry import make_backend
from folovllm.cache.block_manager import BlockManager
from folovllm.cache.manager import KVCacheManager
from folovllm.cache.prefix_cache import PrefixCachingBlockManager
from folovllm.cache.slot_manager import SlotManager
from folovllm.config import EngineConfig
from folovllm.engine.event_stream import Events
from folovllm.engine.extension import Extension, asked_for
from folovllm.engine.scheduler import Scheduler, SchedulerLike, chunk, preempt, unless_finished, wait, whole_prompt
from folovllm.engine.setup import EngineSetup
from folovllm.executor.abstract import Executor
from folovllm.layers.layer_set import LayerSet
from folovllm.learn import builders
from folovllm.models.loader import load_native_model
from folovllm.models.model_config import num_linear_of, window_of
from folovllm.plugins import CONNECTORS, SNAPSHOTS, named
from folovllm.sample.sampler import Sampler
from folovllm.worker.model_runner import ModelRunner


def make_scheduler(
    setup: EngineSetup, extension: Extension | None, executor: Executor, events: Events
) -> SchedulerLike:
    """Make the scheduler of a batch that changes at every step (M2)."""
    config = setup.config
    make_kv: Callable[..., KVCacheManager] = cache_manager(config)
    tokens = tokens_of_step(config)
    if window_of(setup.hf_config) is not None:
        from folovllm.cache.sliding import sliding  # here, for few models have windows

        make_kv = sliding(make_kv, setup.hf_config)
    if config.enable_prefix_caching and num_linear_of(setup.hf_config):
        make_kv, tokens = named(SNAPSHOTS)(setup, tokens)
    kv = make_kv(executor.num_kv_blocks, setup.block_size, events)
    if own := user_component(config, "scheduler"):
        return own(kv, setup.max_num_seqs, setup.max_num_batched_tokens, tokens)
    make = Scheduler if extension is None else extension.scheduler(Scheduler, executor)
    scheduler = make(
        kv=kv,
        max_num_seqs=setup.max_num_seqs,
        max_num_batched_tokens=setup.max_num_batched_tokens,
        tokens_of_step=tokens,
        on_full=wait if config.kv_cache == "slots" else preempt,  # M2; M3
        by_priority=config.scheduling == "priority",
    )
    make_connector = asked_for(CONNECTORS, setup) if config.extras else None
    if make_connector is None:
        return scheduler
    from folovllm.engine.connected_scheduler import ConnectedScheduler

    return ConnectedScheduler(scheduler, make_connector(setup, executor, scheduler.kv))


def cache_manager(config: EngineConfig) -> type[KVCacheManager]:
    """Choose the manager of the KV cache: a learner's own, else slots (M2), blocks (M3), or blocks that are found again (M5)."""
    if own := user_component(config, "block_manager") or user_component(config, "prefix_cache"):
        return own
    if config.kv_cache == "slots":
        return SlotManager
    return PrefixCachingBlockManager if config.enable_prefix_caching else BlockManager


def tokens_of_step(config: EngineConfig) -> Callable[..., int]:
    """How much of a prompt a step takes: all of it (M2), or what the budget has left (M5); steps that overlap stop in time (M6)."""
    tokens: Callable[..., int] = chunk if config.enable_chunked_prefill else whole_prompt
    if config.enable_chunked_prefill and config.long_prefill_token_threshold:
        tokens = partial(chunk, threshold=config.long_prefill_token_threshold)
    return unless_finished(tokens) if config.async_scheduling else tokens


def make_model_runner(setup: EngineSetup, extension: Extension | None) -> ModelRunner:
    """Make the runner of our model for a batch (M2)."""
    load_model = partial(load_native_model, setup, layers_of(setup, extension))
    make = ModelRunner if extension is None else extension.model_runner(ModelRunner)
    slots, backend = cache_manager(setup.config).slots, attention_backend(setup, extension)
    return make(setup, load_model, make_sampler(setup), slots, backend)


def layers_of(setup: EngineSetup, extension: Extension | None) -> LayerSet:
    """Return what the model is built from; an extension may put its own in the place."""
    return layer_set(setup) if extension is None else extension.layer_set(partial(layer_set, setup))


def attention_backend(setup: EngineSetup, extension: Extension | None) -> AttentionBackend:
    """Make the attention backend that the configuration names (M2 to M4); M1's runners have their own."""
    if own := user_component(setup.config, "prefill"):
        from folovllm.attention.backends.triton import TritonBackend

        return TritonBackend(setup.attention, own)
    usual = partial(make_backend, setup.backend, setup.attention)
    return usual() if extension is None else extension.attention_backend(usual)


def layer_set(setup: EngineSetup) -> LayerSet:
    """What the model is built from: plain torch (M1), or kernels (M4); and where it counts what it does, if somebody wants to know."""
    layers, config = LayerSet(), setup.config
    if config.compile or config.packed_steps or not setup.backend.startswith("torch"):
        from folovllm.models.kernel_layers import kernel_layers

        layers = kernel_layers(setup)
    return replace(layers, counters={} if config.extras.get("count_experts") else None)


def make_sampler(setup: EngineSetup) -> Sampler:
    """Make the sampler (M1), compiled if the configuration asks for it."""
    if setup.config.compile:
        from folovllm.sample.compiled import CompiledSampler

        return CompiledSampler()
    return Sampler()


def user_component(config: EngineConfig, place: str) -> Any:
    """The component that a learner wrote for a place, or None: the engine's own stands there. Raises what `builders.load` raises."""
    return builders.load(place) if place in config.builder_names else None
