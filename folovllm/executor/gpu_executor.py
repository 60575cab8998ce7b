"""The executor of a single device: its worker runs in this process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from folovllm.executor.abstract import T
from folovllm.step.schedule import NothingScheduled, SchedulerOutput, StepResult
from folovllm.worker.gpu_worker import GPUWorker


class GPUExecutor:
    """Passes each step to its one worker. Despite the name, which is vLLM's, the device may be a CPU."""

    def __init__(self, worker: GPUWorker[SchedulerOutput, StepResult]) -> None:
        self._worker = worker
        worker.load_model()

    @property
    def num_kv_blocks(self) -> int:
        return self._worker.num_kv_blocks

    def execute_model(self, output: SchedulerOutput) -> StepResult:
        """Run one step. Raises `NothingScheduled` if it is empty."""
        if not output.scheduled_seqs:
            raise NothingScheduled
        return self._worker.execute_model(output)

    submit = execute_model  # nothing here overlaps: the result is there at once

    def collective_rpc(self, function: Callable[..., T], *arguments: Any) -> list[T]:
        return [function(self._worker, *arguments)]

    def shutdown(self) -> None:
        self.__dict__.pop("_worker", None)
