"""Executors that send packed steps. This is the one place where a step is packed, for one device and for many."""

from __future__ import annotations

from abc import ABC, abstractmethod

from folovllm.executor.abstract import Pending
from folovllm.step.packed import PackedStep, StepPacker
from folovllm.step.schedule import NothingScheduled, SchedulerOutput, StepResult
from folovllm.worker.gpu_worker import GPUWorker
from folovllm.worker.graph_runner import GraphRunner, PendingStep

PackedWorker = GPUWorker[PackedStep, PendingStep]


class PackedExecutor(ABC):
    """Packs each step once and sends it off; a subclass says how it travels."""

    def __init__(self, max_num_seqs: int, num_kv_blocks: int, buckets: list[int]) -> None:
        self.num_kv_blocks = num_kv_blocks
        self.graph_widths = tuple(buckets)
        self._packer = StepPacker(max_num_seqs, buckets)

    def execute_model(self, output: SchedulerOutput) -> StepResult:
        """Run one step. Raises `NothingScheduled` if it is empty."""
        return self.submit(output).wait()

    def submit(self, output: SchedulerOutput) -> Pending:
        """Start one step and return at once. Raises `NothingScheduled` if it is empty."""
        self.check()
        if not output.shares:
            raise NothingScheduled
        return self._send(self._packer.pack(output))

    @abstractmethod
    def check(self) -> None:
        """Raise an error if no step can be sent any more."""

    @abstractmethod
    def _send(self, step: PackedStep) -> Pending:
        """Start a packed step."""

    @abstractmethod
    def shutdown(self) -> None:
        """Give everything back. A second call does nothing."""


class LocalExecutor(PackedExecutor):
    """Runs one worker in this process, so that nothing has to travel."""

    def __init__(self, max_num_seqs: int, worker: PackedWorker, runner: GraphRunner) -> None:
        self._worker: PackedWorker | None = worker
        worker.load_model()
        super().__init__(max_num_seqs, worker.num_kv_blocks, runner.buckets)

    def check(self) -> None:
        """Raise RuntimeError after `shutdown`."""
        self._running()

    def shutdown(self) -> None:
        """Drop the model and its cache. A second call does nothing."""
        self._worker = None

    def _send(self, step: PackedStep) -> PendingStep:
        return self._running().execute_model(step)

    def _running(self) -> PackedWorker:
        if self._worker is None:
            raise RuntimeError("the engine was closed: make a new one")
        return self._worker
