"""An executor for a model that nobody schedules: several decode steps of it are one call (X3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from folovllm.executor.abstract import Run
from folovllm.executor.packed_executor import LocalExecutor
from folovllm.spec_decode.run import RunPacker
from folovllm.spec_decode.run_graph_runner import WIDEST, RunGraphRunner
from folovllm.step.schedule import SchedulerOutput, StepResult
from folovllm.worker.gpu_worker import GPUWorker


@dataclass(slots=True, frozen=True)
class Over:
    """Decode steps that have run."""

    results: list[StepResult]
    names: None = None

    def wait(self) -> list[StepResult]:
        """As `Run`."""
        return self.results


class RunExecutor(LocalExecutor):
    """A `LocalExecutor` that sends decode steps down together, where they are recorded; else it runs one after the other."""

    def __init__(self, max_num_seqs: int, worker: GPUWorker[Any, Any], runner: RunGraphRunner) -> None:
        super().__init__(max_num_seqs, worker, runner)
        self._packer: RunPacker = RunPacker(max_num_seqs, runner.buckets)
        self._widest = min(WIDEST, max(runner.buckets, default=0))

    def submit_run(self, outputs: Sequence[SchedulerOutput]) -> Run:
        """As `RunsSteps`."""
        if max(len(output.shares) for output in outputs) > self._widest:
            return Over([self.execute_model(output) for output in outputs])
        run: Run = self._running().execute_model(self._packer.pack_run(outputs))  # type: ignore[arg-type,assignment]
        return run
