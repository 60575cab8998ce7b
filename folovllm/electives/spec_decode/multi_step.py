"""Several decode steps of a draft model in one call: each row goes on from the token that it sampled, on the device.

A graph has 1, 2, 4, ... steps, and a call is put together of these: 7 steps are 4, 2 and 1. So there are few graphs to capture,
and each has lines of its own for its tokens. A graph begins with the copy of its input from the host and ends with the copy of
its tokens to the host, so that a call costs the host a launch or two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from folovllm.engine.setup import EngineSetup
from folovllm.executor.packed_executor import LocalExecutor
from folovllm.step.bitmasks import TokenBitmasks
from folovllm.step.packed import PackedStep, choose_bucket, is_plain_decode, split
from folovllm.step.schedule import Int32, SchedulerOutput, StepResult
from folovllm.worker.buckets import Bucket, decode_bucket, padding_of
from folovllm.worker.gpu_worker import GPUWorker
from folovllm.worker.graph_runner import GraphRunner
from folovllm.worker.model_runner import ModelRunner
from folovllm.worker.step_graph import StepGraph

WIDEST = 32  # sequences of a captured call: beyond, a step takes the device much longer than the host takes to start it


class DraftTokens:
    """The tokens that a draft model or a head drafted last, on the device. Each has a *placeholder id*, behind the vocabulary.

    So a step can bring draft tokens that the host does not know yet: drafting and verifying are on one device, which works in
    order. A placeholder id is valid until drafting begins again.

    Attributes:
        sampled: [lines, rows] int32, on the device. host: the same in host memory, once `arrived`.
        placeholder_ids: [lines, rows] int32.
    """

    def __init__(self, vocab_size: int, num_lines: int, num_rows: int, device: torch.device) -> None:
        shape = num_lines, num_rows
        self._first_placeholder = vocab_size
        self._resolved = torch.arange(-1, vocab_size + num_lines * num_rows, dtype=torch.int32, device=device)
        self.sampled = self._resolved[1 + vocab_size :].view(shape)
        self.placeholder_ids: Int32 = np.arange(num_lines * num_rows, dtype=np.int32).reshape(shape) + vocab_size
        self.host = torch.zeros(shape, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._on_host = self.host.numpy().ravel()  # a view
        self.arrived: torch.cuda.Event | None = None  # behind the last multi-step decode; None on a CPU

    @classmethod
    def for_multi_step(cls, longest: int, setup: EngineSetup) -> DraftTokens:
        """Return room for multi-step decodes of up to `longest` steps in graphs of 1, 2, 4, ... steps, each with lines of its own.

        `setup` describes the model that verifies. Lines begin at multiples of 16 bytes.
        """
        return cls(setup.vocab_size, (1 << longest.bit_length()) - 1, cls.num_rows(setup.max_num_seqs), setup.device)

    @staticmethod
    def num_rows(max_num_seqs: int) -> int:
        """Return the rows of a line, which begins at a multiple of 16 bytes."""
        return -(-max_num_seqs // 4) * 4

    def resolve_on_device(self, tokens: torch.Tensor) -> None:
        """Replace placeholder ids in `tokens` [n] int32; what is in flight stays. Device work only."""
        torch.index_select(self._resolved, 0, tokens + 1, out=tokens)

    def resolve(self, tokens: npt.NDArray[np.signedinteger[Any]]) -> npt.NDArray[np.signedinteger[Any]]:
        """Return [n] tokens with their placeholder ids replaced. The host waits for the multi-step decode."""
        if self.arrived is not None:
            self.arrived.synchronize()
        places = tokens - self._first_placeholder
        return np.where(places >= 0, self._on_host[np.maximum(places, 0)], tokens)


@dataclass(slots=True, frozen=True, eq=False)
class PackedSteps:
    """The input of decode steps that run one after the other, on the host.

    Attributes:
        numbers: [n, at least what a step has], the buffers of decode steps, each padded to the width of the widest.
        width: columns of each step. num_seqs: [n], of each step.
        is_special: some sequence samples with filters.
    """

    numbers: Int32
    width: int
    num_seqs: list[int]
    is_special: bool


@dataclass(slots=True, frozen=True)
class Completed:
    """Decode steps that have run."""

    results: list[StepResult]
    placeholder_ids: None = None

    def wait(self) -> list[StepResult]:
        """Return what each step sampled."""
        return self.results


@dataclass(slots=True, frozen=True)
class PendingSteps:
    """Decode steps that were started. Their tokens are in `drafted`, in these `lines`."""

    num_seqs: list[int]
    lines: list[int]
    drafted: DraftTokens

    @property
    def placeholder_ids(self) -> Int32:
        """Return the placeholder ids of the tokens that step j samples for its sequence i, [j, i]."""
        return self.drafted.placeholder_ids[self.lines]

    def wait(self) -> list[StepResult]:
        """Wait for the last token and return what each step sampled."""
        tokens = self.drafted.resolve(self.placeholder_ids[:, : max(self.num_seqs)]).tolist()
        counted = zip(tokens, self.num_seqs, strict=True)
        return [StepResult([[token] for token in step[:count]], {}) for step, count in counted]


class MultiStepRunner(GraphRunner):
    """A `GraphRunner` that also captures several decode steps in a row, with the sampler of one pass or the one for all rows."""

    def __init__(self, setup: EngineSetup, runner: ModelRunner, *others: Any, drafted: DraftTokens) -> None:
        """`drafted`: gets the tokens. Its lines are the most steps of a call."""
        super().__init__(setup, runner, *others)
        self._drafted = drafted
        self._out = torch.zeros(drafted.sampled.shape, dtype=torch.int64, device=setup.device)  # as kernels sample
        self._ended = torch.cuda.Event() if setup.device.type == "cuda" else None

    def execute_model(self, step: PackedStep | TokenBitmasks | PackedSteps) -> Any:
        """Return what the runner returns for a step, and `PendingSteps` for several."""
        return self._start_steps(step) if isinstance(step, PackedSteps) else super().execute_model(step)

    def _start_steps(self, steps: PackedSteps) -> PendingSteps:
        if self._drafted.arrived is not None:
            self._drafted.arrived.synchronize()  # the last call has read its input
        lines: list[int] = []
        for n in parts(len(steps.numbers)):
            graph = self._graph_of(steps.width, n, steps.is_special)
            graph.replay(torch.from_numpy(steps.numbers[len(lines) : len(lines) + n]))
            lines += range(n - 1, 2 * n - 1)
        if self._ended is not None:
            self._ended.record()
            self._drafted.arrived = self._ended
        return PendingSteps(steps.num_seqs, lines, self._drafted)

    def _graph_of(self, width: int, length: int, is_special: bool) -> StepGraph:
        """Return the graph of so many steps. It is captured now, with nothing but padding, if none is kept."""

        def capture() -> StepGraph:
            numbers = np.repeat(padding_of_step(width, self._setup.max_num_seqs), length, 0)
            return self._graph_pool.capture(numbers, self._steps(decode_bucket(width), is_special), from_host=True)

        return self._graphs.get(width, f"{length} steps{' special' * is_special}", capture)

    def _steps(self, bucket: Bucket, is_special: bool) -> Callable[[torch.Tensor], None]:
        """Return the work of decode steps, from their buffers [n, ...] in host memory to their tokens there."""

        def work(numbers: torch.Tensor) -> None:
            lines = slice(len(numbers) - 1, 2 * len(numbers) - 1)
            for step, out in zip(numbers.to(self._setup.device, non_blocking=True), self._out[lines], strict=True):
                self._forward(bucket, step)
                logits, fields = self._logits[: bucket.num_decodes], split(step, bucket.columns).fields
                (self._sample_rows if is_special else self._one_pass)(logits, fields, out)
            self._drafted.sampled[lines] = self._out[lines]
            self._drafted.host[lines].copy_(self._drafted.sampled[lines], non_blocking=True)

        return work

    def _capture(self, bucket: Bucket) -> None:
        super()._capture(bucket)
        if bucket.is_decode and bucket.num_decodes <= WIDEST:
            for length in parts(len(self._drafted.sampled)):
                for is_special in (False, True):
                    self._graph_of(bucket.num_decodes, length, is_special)

    def _dry_run_graphs(self) -> None:
        """Run one step of each width. What a step launches does not depend on its place in a graph."""
        super()._dry_run_graphs()
        for width in self._graphs.widths:
            for is_special in (False, True):
                padding = torch.from_numpy(padding_of_step(width, self._setup.max_num_seqs))
                self._steps(decode_bucket(width), is_special)(padding)


class MultiStepExecutor(LocalExecutor):
    """A `LocalExecutor` that starts captured decode steps together, and runs others one after the other."""

    def __init__(self, max_num_seqs: int, worker: GPUWorker[Any, Any], runner: MultiStepRunner) -> None:
        super().__init__(max_num_seqs, worker, runner)
        self._widths = runner.buckets
        self._widest = min(WIDEST, max(runner.buckets, default=0))
        self._paddings = {width: padding_of_step(width, max_num_seqs) for width in runner.buckets}

    def submit_steps(self, outputs: Sequence[SchedulerOutput]) -> PendingSteps | Completed:
        """Start the steps and return at once. The next call may begin when this one is over.

        Each scheduled sequence is a decode of one token in a row that the device knows. A token that an earlier one of the steps
        samples is in flight. Raises ValueError for any other scheduled sequence.
        """
        if max(len(output.scheduled_seqs) for output in outputs) > self._widest:
            return Completed([self.execute_model(output) for output in outputs])
        steps = self._pack_steps(outputs)
        pending: PendingSteps = self._worker.execute_model(steps)  # type: ignore[arg-type,assignment]
        return pending

    def _pack_steps(self, outputs: Sequence[SchedulerOutput]) -> PackedSteps:
        """Pack steps that run one after the other.

        Raises:
            ValueError: a scheduled sequence is no plain decode (`is_plain_decode`), or asks for log-probabilities.
        """
        scheduled_seqs = [scheduled for output in outputs for scheduled in output.scheduled_seqs]
        num_seqs = [len(output.scheduled_seqs) for output in outputs]
        if not all(map(is_plain_decode, scheduled_seqs)) or self._packer.reports_logprobs(scheduled_seqs):
            raise ValueError(
                "a multi-step decode has decodes of one token, in rows that the device knows, and no log-probabilities"
            )
        width = choose_bucket(max(num_seqs), self._widths)
        packed, start = self._packer.pack_decode(scheduled_seqs, len(scheduled_seqs)).fields, 0
        numbers = np.repeat(self._paddings[width], len(outputs), 0)
        for step, count in zip(numbers, num_seqs, strict=True):
            split(step, decode_bucket(width).columns).fields[:, :count] = packed[:, start : start + count]
            start += count
        return PackedSteps(numbers, width, num_seqs, self._packer.is_special(scheduled_seqs))


def padding_of_step(width: int, padding_row: int) -> Int32:
    """Return a decode step of padding, [1, ...], so long that the next one begins at a multiple of 16 bytes."""
    numbers = padding_of(decode_bucket(width), padding_row)
    return np.pad(numbers, (0, -len(numbers) % 4))[None]


def parts(count: int) -> Iterator[int]:
    """Yield the powers of two whose sum is `count`, the largest first."""
    for bit in reversed(range(count.bit_length())):
        if count >> bit & 1:
            yield 1 << bit
