"""An executor for a model that nobody schedules: several decode steps of it are one call (X3)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from folovllm.executor.packed_executor import LocalExecutor
from folovllm.step.run import RunPacker
from folovllm.step.schedule import SchedulerOutput, StepResult
from folovllm.worker.gpu_worker import GPUWorker
from folovllm.worker.run_graph_runner import PendingRun, RunGraphRunner


class RunExecutor(LocalExecutor):
    """A `LocalExecutor` that sends decode steps down together, where steps are recorded."""

    def __init__(self, max_num_seqs: int, worker: GPUWorker[Any, Any], runner: RunGraphRunner) -> None:
        super().__init__(max_num_seqs, worker, runner)
        self._packer: RunPacker = RunPacker(max_num_seqs, runner.buckets)

    def run(self, outputs: Sequence[SchedulerOutput]) -> list[StepResult]:
        """As `RunsSteps`."""
        if not self.graph_widths:
            return [self.execute_model(output) for output in outputs]
        pending: PendingRun = self._running().execute_model(self._packer.pack_run(outputs))  # type: ignore[arg-type]
        return pending.wait()
