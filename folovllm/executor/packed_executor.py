"""Executors that pack a step once and send it to one device or to many."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from folovllm.executor.abstract import Pending, T
from folovllm.step.bitmasks import TokenBitmasks
from folovllm.step.packed import PackedStep, StepPacker
from folovllm.step.schedule import NothingScheduled, SchedulerOutput, StepResult
from folovllm.worker.gpu_worker import GPUWorker
from folovllm.worker.graph_runner import GraphRunner, PendingStep

PackedWorker = GPUWorker[PackedStep | TokenBitmasks, PendingStep | None]


class PackedExecutor:
    """Packs each step once. A subclass sends it.

    Attributes:
        _send: starts a packed step, or samples for the one that deferred its sampling. Returns a `Pending` unless this one defers it.
    """

    _send: Callable[[PackedStep | TokenBitmasks], Any]

    def __init__(self, max_num_seqs: int, num_kv_blocks: int, buckets: list[int]) -> None:
        self.num_kv_blocks = num_kv_blocks
        self.graph_widths = tuple(buckets)
        self._packer = StepPacker(max_num_seqs, buckets)

    def execute_model(self, output: SchedulerOutput) -> StepResult:
        return self.submit(output).wait()

    def submit(self, output: SchedulerOutput) -> Pending:
        if not output.scheduled_seqs:
            raise NothingScheduled
        pending: Pending = self._send(self._packer.pack(output))
        return pending

    def forward(self, output: SchedulerOutput) -> None:
        """Start one step up to its logits and return at once. The next call must be `sample`."""
        step = self._packer.pack(output)
        step.defers_sampling = True
        self._send(step)

    def sample(self, masks: TokenBitmasks) -> Pending:
        """Sample for the step that `forward` started. Rows in `masks` sample only tokens that their mask allows."""
        pending: Pending = self._send(masks)
        return pending


class LocalExecutor(PackedExecutor):
    """Runs one worker in this process, with no message to another one."""

    def __init__(self, max_num_seqs: int, worker: PackedWorker, runner: GraphRunner) -> None:
        self._worker = worker
        worker.load_model()
        self._send = worker.execute_model
        super().__init__(max_num_seqs, worker.num_kv_blocks, runner.buckets)

    def collective_rpc(self, function: Callable[..., T], *arguments: Any) -> list[T]:
        return [function(self._worker, *arguments)]

    def shutdown(self) -> None:
        self.__dict__.pop("_worker", None)
        self.__dict__.pop("_send", None)
