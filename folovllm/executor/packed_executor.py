"""Executors that send packed steps. This is the one place where a step is packed, for one device and for many."""

from __future__ import annotations

from abc import ABC, abstractmethod

from folovllm.executor.abstract import Pending
from folovllm.step.packed import PackedStep, StepPacker
from folovllm.step.schedule import NothingScheduled, SchedulerOutput, StepResult
from folovllm.step.token_bitmask import TokenBitmasks
from folovllm.worker.gpu_worker import GPUWorker
from folovllm.worker.graph_runner import GraphRunner
from folovllm.worker.pending_step import PendingStep

PackedWorker = GPUWorker[PackedStep | TokenBitmasks, PendingStep | None]


class PackedExecutor(ABC):
    """Packs each step once and sends it off; a subclass says how it travels."""

    def __init__(self, max_num_seqs: int, num_kv_blocks: int, buckets: list[int]) -> None:
        self.num_kv_blocks = num_kv_blocks
        self.graph_widths = tuple(buckets)
        self._packer = StepPacker(max_num_seqs, buckets)

    def execute_model(self, output: SchedulerOutput) -> StepResult:
        """Run one step. Raises `NothingScheduled` if it is empty."""
        if output.masks is None:
            return self.submit(output).wait()
        self.forward(output)
        return self.sample(output.masks).wait()

    def submit(self, output: SchedulerOutput) -> Pending:
        """Start one step and return at once. Raises `NothingScheduled` if it is empty."""
        return self._send(self._pack(output))

    def forward(self, output: SchedulerOutput) -> None:
        """Start one step up to its logits, and return at once; `sample` must be what is called next."""
        step = self._pack(output)
        step.defers_sampling = True
        self._send_ahead(step)

    def sample(self, masks: TokenBitmasks) -> Pending:
        """Let the step that `forward` started sample. Rows in `masks` may sample only what their mask allows."""
        self.check()
        return self._send(masks)

    def _pack(self, output: SchedulerOutput) -> PackedStep:
        self.check()
        if not output.scheduled_seqs:
            raise NothingScheduled
        return self._packer.pack(output)

    @abstractmethod
    def expert_load(self) -> list[list[int]]:
        """As `Executor`. No step may wait with sampling."""

    @abstractmethod
    def check(self) -> None:
        """Raise an error if no step can be sent any more."""

    @abstractmethod
    def _send(self, step: PackedStep | TokenBitmasks) -> Pending:
        """Start a packed step, or let the one that was sent ahead sample."""

    @abstractmethod
    def _send_ahead(self, step: PackedStep) -> None:
        """Start a packed step that samples late."""

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

    def expert_load(self) -> list[list[int]]:
        return self._running().expert_load()

    def shutdown(self) -> None:
        """Drop the model and its cache. A second call does nothing."""
        self._worker = None

    def _send(self, step: PackedStep | TokenBitmasks) -> PendingStep:
        pending = self._running().execute_model(step)
        assert pending is not None
        return pending

    def _send_ahead(self, step: PackedStep) -> None:
        self._running().execute_model(step)

    def _running(self) -> PackedWorker:
        if self._worker is None:
            raise RuntimeError("the engine was closed: make a new one")
        return self._worker
