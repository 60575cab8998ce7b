"""How an engine is put together: which class stands in which place, by configuration.

It reads like the table of the milestones: each `make_*` function selects one component, and its docstring says which
milestone brought which class. No other code asks for a milestone. In some places a class that a learner wrote can stand
(`folovllm.builders`).
"""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from folovllm import builders
from folovllm.attention.backends.abstract import AttentionBackend
from folovllm.attention.backends.registry import make_backend
from folovllm.cache.block_manager import BlockManager
from folovllm.cache.manager import KVCacheManager
from folovllm.cache.prefix_cache import PrefixCachingBlockManager
from folovllm.cache.sliding import sliding
from folovllm.cache.slot_manager import SlotManager
from folovllm.config import EngineConfig
from folovllm.distributed.group import Group
from folovllm.distributed.sharding import local_config
from folovllm.engine.core import EngineCore
from folovllm.engine.extension import Extension, extension_of, make_logits_mask
from folovllm.engine.logits_mask import LogitsMask
from folovllm.engine.overlap import OverlappedEngine
from folovllm.engine.scheduler import (
    Scheduler,
    SchedulerLike,
    TokensOfStep,
    chunk,
    preempt,
    unless_finished,
    up_to_border,
    wait,
    whole_prompt,
)
from folovllm.engine.serial_scheduler import SerialScheduler
from folovllm.engine.setup import largest_product
from folovllm.event_stream import Events
from folovllm.executor.abstract import Executor
from folovllm.executor.gpu_executor import GPUExecutor
from folovllm.executor.packed_executor import LocalExecutor, PackedWorker
from folovllm.files import cache_dir
from folovllm.layers.layer_set import LayerSet
from folovllm.models.loader import load_native_model
from folovllm.models.sharded_loader import load_sharded_model
from folovllm.plugins import SNAPSHOTS, named
from folovllm.sample.sampler import Sampler
from folovllm.sample.sampler_state import SamplerState
from folovllm.sample.sampling_row import line_width, mask_width
from folovllm.setup import EngineSetup
from folovllm.step.schedule import SchedulerOutput, StepResult
from folovllm.worker.gpu_worker import GPUWorker, Runner
from folovllm.worker.graph_runner import GraphRunner
from folovllm.worker.kv_memory import require_memory
from folovllm.worker.model_runner import ModelRunner
from folovllm.worker.step_graph import AllGraphs
from folovllm.worker.step_sampler import LocalSampler, StepSampler, TensorParallelSampler

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from folovllm.kernels.cpu.ops import CpuKernels

LARGE = 50_000_000  # bytes of weights: below this, kernels for a CPU gain less than their compiling takes


def load_builders(config: EngineConfig) -> None:
    """Import the components that a learner wrote. Raises what `builders.load` raises, before any work."""
    for name in config.builder_names:
        builders.load(name)


def make_extension(setup: EngineSetup) -> Extension:
    """Make the extension that the configuration asks for (`folovllm.engine.extension`), and what it needs before the executor is made."""
    extension = extension_of(setup)
    extension.prepare()
    return extension


def make_core(
    setup: EngineSetup, extension: Extension, executor: Executor, tokenizer: PreTrainedTokenizerBase
) -> EngineCore:
    """Make what serves requests, and its scheduler."""
    events, mask = Events(), make_logits_mask(tokenizer, setup.vocab_size)
    return EngineCore(make_scheduler(setup, extension, executor, mask, events), executor, events, mask)


def make_loop(core: EngineCore, config: EngineConfig) -> EngineCore | OverlappedEngine:
    """Choose the step: one at a time (M1), or one ahead (M6)."""
    return OverlappedEngine(core) if config.async_scheduling else core


def make_scheduler(
    setup: EngineSetup, extension: Extension, executor: Executor, mask: LogitsMask, events: Events
) -> SchedulerLike:
    """Make the scheduler: one request after the other (M1), or a batch that changes at every step (M2)."""
    config = setup.config
    if config.kv_cache == "growing":
        return SerialScheduler(events)
    make_kv, tokens = sliding(cache_manager(config), setup.hf_config), tokens_of_step(config)
    if setup.num_snapshots:
        interval = setup.snapshot_interval
        make_kv = partial(named(SNAPSHOTS), num_snapshots=setup.num_snapshots, interval=interval)
        tokens = up_to_border(tokens, interval)
    kv = make_kv(executor.num_kv_blocks, setup.block_size, events)
    if own := learners(config, "scheduler"):
        return own(kv, setup.max_num_seqs, setup.max_num_batched_tokens, tokens)
    return extension.scheduler(Scheduler, executor, mask)(
        kv=kv,
        max_num_seqs=setup.max_num_seqs,
        max_num_batched_tokens=setup.max_num_batched_tokens,
        tokens_of_step=tokens,
        on_full=wait if config.kv_cache == "slots" else preempt,  # M2; M3
        by_priority=config.scheduling == "priority",
    )


def cache_manager(config: EngineConfig) -> type[KVCacheManager]:
    """Choose the manager of the KV cache: slots (M2), blocks (M3), blocks that are found again (M5)."""
    if own := learners(config, "block_manager") or learners(config, "prefix_cache"):
        return own
    if config.kv_cache == "slots":
        return SlotManager
    return PrefixCachingBlockManager if config.enable_prefix_caching else BlockManager


def tokens_of_step(config: EngineConfig) -> TokensOfStep:
    """How much of a prompt a step takes: all of it (M2), or what the budget has left (M5); steps that overlap stop in time (M6)."""
    tokens: TokensOfStep = chunk if config.enable_chunked_prefill else whole_prompt
    if config.enable_chunked_prefill and config.long_prefill_token_threshold:
        tokens = partial(chunk, threshold=config.long_prefill_token_threshold)
    return unless_finished(tokens) if config.async_scheduling else tokens


def make_executor(setup: EngineSetup, extension: Extension) -> Executor:
    """Make the executor: one device (M1), one that is sent packed steps, or several that share the model (M6)."""
    if not setup.config.packed_steps:
        counters = counters_of(setup)
        return GPUExecutor(GPUWorker(setup.device, make_runner(setup, extension, counters), counters))
    if setup.config.tensor_parallel_size == 1:
        return LocalExecutor(setup.max_num_seqs, *make_packed_worker(setup, extension=extension))
    if "TORCHELASTIC_RUN_ID" in os.environ:
        from folovllm.executor.torchrun_executor import TorchrunExecutor

        return TorchrunExecutor(setup, make_packed_worker)
    from folovllm.executor.multiproc_executor import MultiprocExecutor

    return MultiprocExecutor(setup, make_packed_worker)


def make_runner(
    setup: EngineSetup, extension: Extension, counters: dict[str, torch.Tensor] | None = None
) -> Runner[SchedulerOutput, StepResult]:
    """Make the runner of the model: transformers' (M1), ours for one sequence (M1), ours for a batch (M2)."""
    if setup.config.model_impl == "hf":
        from folovllm.worker.hf_model_runner import HFModelRunner

        return HFModelRunner(setup)
    layers = extension.layer_set(partial(layer_set, setup, counters))
    load_model, sampler = partial(load_native_model, setup, layers), make_sampler(setup)
    if loop := learners(setup.config, "decode_loop"):
        from folovllm.worker.loop_runner import LoopRunner

        return LoopRunner(setup, load_model, sampler, loop)
    if setup.config.kv_cache == "growing":
        from folovllm.worker.serial_model_runner import SerialModelRunner

        return SerialModelRunner(setup, load_model, sampler)
    kind = extension.model_runner(ModelRunner)
    return kind(setup, load_model, sampler, cache_manager(setup.config).slots, attention_backend(setup, extension))


def make_packed_worker(
    setup: EngineSetup, group: Group | None = None, extension: Extension | None = None
) -> tuple[PackedWorker, GraphRunner]:
    """A worker for packed steps, with the whole model or, with a group, a rank's part of it (M6).

    `setup` describes the whole model, but for the device, which is the rank's own.
    """
    extension = extension or extension_of(setup)
    plain = extension.model_runner(ModelRunner)
    sampler, slots, counters = make_sampler(setup), cache_manager(setup.config).slots, counters_of(setup)
    backend, graphs = attention_backend(setup, extension), (learners(setup.config, "graph_cache") or AllGraphs)
    step_sampler: StepSampler
    layers = extension.layer_set(partial(layer_set, setup, counters))
    if group is None:
        step_sampler = LocalSampler(
            setup.vocab_size, sampler, use_kernel=setup.device.type == "cuda" and not setup.config.compile
        )
        inner = plain(setup, partial(load_native_model, setup, layers), sampler, slots, backend)
    else:
        step_sampler = TensorParallelSampler(setup.vocab_size, group)
        part = replace(
            setup,
            hf_config=local_config(
                setup.hf_config, group.size, bool(setup.config.extras.get("enable_expert_parallel"))
            ),
        )
        inner = plain(
            part, partial(load_sharded_model, setup, group, layers), sampler, slots, backend, step_sampler.whole
        )
    bytes_per_row = 4 * (line_width(setup.vocab_size) + mask_width(setup.vocab_size))
    require_memory(
        setup.device, setup.max_num_seqs * bytes_per_row, f"the sampling states of {setup.max_num_seqs} sequences"
    )
    row_sampler = SamplerState(setup.max_num_seqs, setup.vocab_size, setup.device, sampler, extension.num_samples())
    runner = extension.graph_runner(GraphRunner)(setup, inner, step_sampler, row_sampler, graphs(setup.max_num_seqs))
    return GPUWorker(setup.device, runner, counters), runner


def attention_backend(setup: EngineSetup, extension: Extension) -> AttentionBackend:
    """Make the attention backend that the configuration names (M2 to M4); M1's runners have their own."""
    if own := learners(setup.config, "prefill"):
        from folovllm.attention.backends.triton import TritonBackend

        return TritonBackend(setup.attention, own)
    return extension.attention_backend(partial(make_backend, setup.backend, setup.attention))


def counters_of(setup: EngineSetup) -> dict[str, torch.Tensor] | None:
    """Return a dict that the model fills with its counters of experts (`LayerSet.counters`), or None if nobody wants them."""
    return {} if setup.config.extras.get("count_experts") else None


def learners(config: EngineConfig, place: str) -> Any:
    """The component that a learner wrote for a place, or None: the engine's own stands there. Raises what `builders.load` raises."""
    return builders.load(place) if place in config.builder_names else None


def make_sampler(setup: EngineSetup) -> Sampler:
    """Make the sampler (M1), compiled if the configuration asks for it."""
    if setup.config.compile:
        from folovllm.sample.compiled import CompiledSampler

        return CompiledSampler()
    return Sampler()


def layer_set(setup: EngineSetup, counters: dict[str, torch.Tensor] | None = None) -> LayerSet:
    """What the model is built from, and where it counts what it does (`LayerSet`)."""
    return replace(kernels_for(setup), counters=counters)


def kernels_for(setup: EngineSetup) -> LayerSet:
    """Plain torch (M1), one kernel instead of several operations (M4), kernels for few tokens, and products that norm and
    add as they go (M6); or layers that are compiled, where that is asked for.
    """
    if setup.config.compile:
        from folovllm.layers.compiled import compiled_layers

        return replace(compiled_layers(), kernels=setup.device.type == "cuda")
    if (kernels := cpu_kernels(setup)) is not None:
        from folovllm.models.cpu_layers import cpu_layers

        return cpu_layers(kernels)
    if "triton" not in setup.backend and "flash_attn" not in setup.backend:
        return LayerSet()
    from folovllm.models.fused import fused_layers
    from folovllm.models.fused_layer import skinny_layers

    return (skinny_layers if setup.config.packed_steps else fused_layers)(setup.attention.head_dim)


def cpu_kernels(setup: EngineSetup) -> CpuKernels | None:
    """Load the kernels for a CPU (M6); None without a compiler, or for a small model, which would wait for it and gain little."""
    wanted = setup.device.type == "cpu" and setup.backend == "torch_paged" and setup.config.packed_steps
    if not wanted or weight_bytes(setup) < LARGE:
        return None
    from folovllm.kernels.cpu.library import load
    from folovllm.kernels.cpu.ops import CpuKernels

    library = load(setup.dtype, cache_dir)
    return None if library is None else CpuKernels(library, setup.dtype)


def weight_bytes(setup: EngineSetup) -> int:
    """Bytes of the head and of all MLPs, about: most of a model."""
    outputs, inputs = largest_product(setup, 1)
    return inputs * (setup.vocab_size + 3 * setup.num_layers * outputs) * setup.dtype.itemsize
