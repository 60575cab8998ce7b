"""How an engine is put together: each `make_*` function selects one component by configuration, and names its milestone.

M2 to M5's are in `folovllm.engine.build_batch`, M6's in `folovllm.engine.build_packed`, which M1 does not import.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from folovllm.config import EngineConfig
from folovllm.engine.core import EngineCore
from folovllm.engine.event_stream import Events
from folovllm.engine.scheduler import SchedulerLike
from folovllm.engine.setup import EngineSetup
from folovllm.executor.abstract import Executor
from folovllm.layers.layer_set import LayerSet
from folovllm.models.loader import load_native_model
from folovllm.sample.sampler import Sampler

if TYPE_CHECKING:
    from folovllm.engine.extension import Extension
    from folovllm.engine.overlap import OverlappedEngine
    from folovllm.step.schedule import SchedulerOutput, StepResult
    from folovllm.worker.runner import Runner


def make_extension(setup: EngineSetup) -> Extension | None:
    """Make the extension that the configuration asks for (`folovllm.engine.extension`); None where no elective changes a part."""
    if not setup.config.extras:
        return None
    from folovllm.engine.extension import extension_of

    if (extension := extension_of(setup)) is not None:
        extension.prepare()
    return extension


def make_core(setup: EngineSetup, extension: Extension | None, executor: Executor) -> EngineCore:
    """Make what serves requests, and its scheduler."""
    events = Events()
    return EngineCore(make_scheduler(setup, extension, executor, events), executor, events)


def make_loop(core: EngineCore, config: EngineConfig) -> EngineCore | OverlappedEngine:
    """Choose the step: one at a time (M1), or one ahead (M6)."""
    if not config.async_scheduling:
        return core
    from folovllm.engine.overlap import OverlappedEngine

    return OverlappedEngine(core)


def make_scheduler(
    setup: EngineSetup, extension: Extension | None, executor: Executor, events: Events
) -> SchedulerLike:
    """Make the scheduler: one request after the other (M1), or a batch that changes at every step (M2)."""
    if setup.config.kv_cache == "growing":
        from folovllm.engine.serial_scheduler import SerialScheduler

        return SerialScheduler(events)
    from folovllm.engine import build_batch

    return build_batch.make_scheduler(setup, extension, executor, events)


def make_executor(setup: EngineSetup, extension: Extension | None) -> Executor:
    """Make the executor: one device (M1), one that is sent packed steps, or several that share the model (M6)."""
    if setup.config.packed_steps:
        from folovllm.engine.build_packed import make_packed_executor

        return make_packed_executor(setup, extension)
    from folovllm.executor.gpu_executor import GPUExecutor
    from folovllm.worker.gpu_worker import GPUWorker

    return GPUExecutor(GPUWorker(setup.device, make_runner(setup, extension)))


def make_runner(setup: EngineSetup, extension: Extension | None) -> Runner[SchedulerOutput, StepResult]:
    """Make the runner of the model: transformers' (M1), ours for one sequence (M1), ours for a batch (M2)."""
    if setup.config.model_impl == "hf":
        from folovllm.worker.hf_model_runner import HFModelRunner

        return HFModelRunner(setup)
    if setup.config.kv_cache != "growing":
        from folovllm.engine.build_batch import make_model_runner

        return make_model_runner(setup, extension)
    return make_serial_runner(setup, extension)


def make_serial_runner(setup: EngineSetup, extension: Extension | None) -> Runner[SchedulerOutput, StepResult]:
    """Make the runner of our model for one sequence (M1), with a loop that a learner wrote where there is one."""
    layers, sampler = LayerSet(), Sampler()
    if setup.config.compile or setup.config.extras:
        from folovllm.engine import build_batch

        layers, sampler = build_batch.layers_of(setup, extension), build_batch.make_sampler(setup)
    load_model = partial(load_native_model, setup, layers)
    if "decode_loop" in setup.config.builder_names:
        from folovllm.learn import builders
        from folovllm.learn.loop_runner import LoopRunner

        return LoopRunner(setup, load_model, sampler, builders.load("decode_loop"))
    from folovllm.worker.serial_model_runner import SerialModelRunner

    return SerialModelRunner(setup, load_model, sampler)
