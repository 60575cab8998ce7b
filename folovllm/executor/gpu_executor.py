"""The executor of a single device: a worker in this very process."""

from __future__ import annotations

from folovllm.engine.scheduler import NothingScheduled, SchedulerOutput
from folovllm.engine.setup import EngineSetup
from folovllm.sample.sampler import SamplerOutput
from folovllm.worker.gpu_worker import GPUWorker
from folovllm.worker.graph_runner import PendingStep


class GPUExecutor:
    """Hands each step to its one worker. Despite the name, which vLLM made common, the device may be a CPU."""

    def __init__(self, setup: EngineSetup) -> None:
        self._worker = GPUWorker(setup)
        self._worker.load_model()

    @property
    def num_kv_blocks(self) -> int:
        """Pages (or slots) that the KV cache holds; 0 where each sequence grows a cache of its own."""
        return self._worker.num_kv_blocks

    def submit(self, output: SchedulerOutput) -> PendingStep:
        """Start one step and return at once, where the runner can (`async_scheduling`)."""
        return self._worker.submit(output)

    def shutdown(self) -> None:
        """Drop the model and its cache; twice is once."""
        self.__dict__.pop("_worker", None)

    def execute_model(self, output: SchedulerOutput) -> SamplerOutput:
        """Run one step; returns a token for each scheduled sequence. Raises `NothingScheduled` if there is none."""
        if not output.scheduled:
            raise NothingScheduled
        return self._worker.execute_model(output)
