"""How the parts of M6 are chosen: workers that get a step as one buffer, on one device or several."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial

from folovllm.distributed.group import ProcessGroup
from folovllm.distributed.sharding import local_config
from folovllm.engine.build_batch import attention_backend, cache_manager, layers_of, make_sampler, user_component
from folovllm.engine.extension import Extension, extension_of
from folovllm.engine.setup import EngineSetup
from folovllm.executor.abstract import Executor
from folovllm.executor.packed_executor import LocalExecutor, PackedWorker
from folovllm.models.loader import load_native_model
from folovllm.models.sharded_loader import load_sharded_model
from folovllm.sample.sampler_state import SamplerState
from folovllm.worker.device_tables import require_memory_of_rows
from folovllm.worker.gpu_worker import GPUWorker
from folovllm.worker.graph_runner import GraphRunner
from folovllm.worker.model_runner import ModelRunner
from folovllm.worker.step_graph import AllGraphs
from folovllm.worker.step_sampler import LocalSampler, StepSampler, TensorParallelSampler


def make_packed_executor(setup: EngineSetup, extension: Extension | None) -> Executor:
    """Make the executor that is sent packed steps, or several that share the model."""
    if setup.config.tensor_parallel_size == 1:
        return LocalExecutor(setup.max_num_seqs, *make_packed_worker(setup, extension=extension))
    if "TORCHELASTIC_RUN_ID" in os.environ:
        from folovllm.executor.torchrun_executor import TorchrunExecutor

        return TorchrunExecutor(setup, make_packed_worker)
    from folovllm.executor.multiproc_executor import MultiprocExecutor

    return MultiprocExecutor(setup, make_packed_worker)


def make_packed_worker(
    setup: EngineSetup, group: ProcessGroup | None = None, extension: Extension | None = None
) -> tuple[PackedWorker, GraphRunner]:
    """A worker for packed steps, with the whole model or, with a group, a rank's part of it (M6).

    `setup` describes the whole model, but for the device, which is the rank's own.
    """
    extension = extension or extension_of(setup) or Extension(setup)
    require_memory_of_rows(setup, extension.num_samples())
    make_runner = extension.model_runner(ModelRunner)
    sampler, slots, layers = make_sampler(setup), cache_manager(setup.config).slots, layers_of(setup, extension)
    backend, graphs = attention_backend(setup, extension), (user_component(setup.config, "graph_cache") or AllGraphs)
    step_sampler: StepSampler
    if group is None:
        use_kernel = setup.device.type == "cuda" and not setup.config.compile
        step_sampler = LocalSampler(sampler, use_kernel=use_kernel)
        inner = make_runner(setup, partial(load_native_model, setup, layers), sampler, slots, backend)
    else:
        step_sampler = TensorParallelSampler(setup.vocab_size, group)
        shard = local_config(setup.hf_config, group.size, bool(setup.config.extras.get("enable_expert_parallel")))
        load, rank_setup = partial(load_sharded_model, setup, group, layers), replace(setup, hf_config=shard)
        inner = make_runner(rank_setup, load, sampler, slots, backend, step_sampler.full_logits)
    rows = setup.max_num_seqs
    row_sampler = SamplerState(rows, setup.vocab_size, setup.device, sampler, extension.num_samples())
    runner = extension.graph_runner(GraphRunner)(setup, inner, step_sampler, row_sampler, graphs(rows))
    return GPUWorker(setup.device, runner), runner
