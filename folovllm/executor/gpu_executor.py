"""The executor of a single device: its worker runs in this process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from folovllm.executor.abstract import T
from folovllm.step.schedule import NothingScheduled, SchedulerOutput, StepResult
from folovllm.worker.gpu_worker import GPUWorker


@dataclass(slots=True, frozen=True)
class Completed:
    result: StepResult

    def wait(self) -> StepResult:
        """Return what it sampled."""
        return self.result


class GPUExecutor:
    """Passes each step to its one worker. Despite the name, which is vLLM's, the device may be a CPU."""

    def __init__(self, worker: GPUWorker[SchedulerOutput, StepResult]) -> None:
        self._worker = worker
        worker.load_model()

    @property
    def num_kv_blocks(self) -> int:
        """Number of blocks (or slots) of the KV cache; 0 where it grows."""
        return self._worker.num_kv_blocks

    def submit(self, output: SchedulerOutput) -> Completed:
        """Run one step; nothing here overlaps. Raises `NothingScheduled` if it is empty."""
        return Completed(self.execute_model(output))

    def execute_model(self, output: SchedulerOutput) -> StepResult:
        """Run one step. Raises `NothingScheduled` if it is empty."""
        if not output.scheduled_seqs:
            raise NothingScheduled
        return self._worker.execute_model(output)

    def collective_rpc(self, function: Callable[..., T], *arguments: Any) -> list[T]:
        return [function(self._worker, *arguments)]

    def shutdown(self) -> None:
        """Drop the model and its cache. A second call does nothing."""
        self.__dict__.pop("_worker", None)
