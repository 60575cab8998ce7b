"""A `GraphRunner` that also takes runs: decode steps of which nobody sees the tokens before the last has drawn (X3).

Each recording has some steps. A run is put together of these, the longest first: 7 steps are 4, 2 and 1. So there are few to
record, and a run costs the host a few launches, one copy there and one back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from folovllm.setup import EngineSetup
from folovllm.step.masks import Masks
from folovllm.step.packed import Field, Int32, PackedStep
from folovllm.step.run import LINES, PackedRun
from folovllm.step.schedule import StepResult
from folovllm.worker.graph_runner import GraphRunner
from folovllm.worker.model_runner import ModelRunner
from folovllm.worker.pending_step import PendingStep
from folovllm.worker.step_graph import StepGraph

LENGTHS = (8, 4, 2, 1)  # steps of a recording
WIDEST = 16  # beyond, a step takes the device longer than the host takes to launch it, and is recorded alone


class PendingRun:
    """A run that was started. Its tokens [n, rows] int64 are on their way to the host, and there once `arrived`."""

    def __init__(self, num_seqs: list[int], tokens: torch.Tensor, arrived: torch.cuda.Event | None) -> None:
        self._num_seqs, self._tokens, self._arrived = num_seqs, tokens, arrived

    def wait(self) -> list[StepResult]:
        """Wait for the last token and return what each step drew."""
        if self._arrived is not None:
            self._arrived.synchronize()
        drawn = self._tokens[:, : max(self._num_seqs)].tolist()
        return [
            StepResult([[token] for token in tokens[:count]], {})
            for tokens, count in zip(drawn, self._num_seqs, strict=True)
        ]


class RunGraphRunner(GraphRunner):
    """Runs are recorded for the widths of decode steps, with draws in one pass and with those of any row."""

    def __init__(self, setup: EngineSetup, runner: ModelRunner, *others: Any, longest: int) -> None:
        """As `GraphRunner`. No run has more than `longest` steps."""
        super().__init__(setup, runner, *others)
        self._lengths = [n for n in LENGTHS if n <= longest]
        shape = longest, setup.max_num_seqs + setup.max_num_seqs % 2  # each line begins at a multiple of 16 bytes
        self._drawn = torch.zeros(shape, dtype=torch.int64, device=setup.device)  # by the run
        self._part = torch.zeros_like(self._drawn[: max(self._lengths)])  # by the recording that ran last

    def execute_model(self, step: PackedStep | Masks | PackedRun) -> Any:
        """As `GraphRunner`; a run has a `PendingRun`."""
        return self._start_run(step) if isinstance(step, PackedRun) else super().execute_model(step)

    def _start_run(self, run: PackedRun) -> PendingRun:
        count, _, width = run.fields.shape
        staged, first = self._steps_in.stage(run.fields.ravel()).view(run.fields.shape), 0
        for n in parts(count, self._lengths_for(width)):
            self._recorded_run(width, n, run.is_special).replay(staged[first : first + n])
            self._drawn[first : first + n] = self._part[:n]
            first += n
        self._steps_in.mark()
        tokens, arrived = self._tokens_out.to_host(self._drawn[:count].view(-1))
        return PendingRun(run.num_seqs, tokens.view(count, -1), arrived)

    def _lengths_for(self, width: int) -> list[int]:
        return self._lengths if width <= WIDEST else [1]

    def _recorded_run(self, width: int, length: int, is_special: bool) -> StepGraph:
        """The graph of so many steps. Records it now, with nothing but padding, if none is kept."""
        kind, work = f"{length} steps{' special' * is_special}", self._run_work(is_special)
        return self._graphs.get(
            width, kind, lambda: self._recorder.record(self._padding_of_run(width, length), work)
        )

    def _run_work(self, is_special: bool) -> Callable[[torch.Tensor], None]:
        """The work of decode steps from their buffer [n, LINES, width] to their tokens, in `self._part`."""

        def steps(fields: torch.Tensor) -> None:
            for step, tokens in zip(fields[:, : len(Field)], self._part, strict=False):
                self._forward(step)
                logits, last = self._logits_of(step), self._tables.last_token
                if not is_special:
                    self._draw.one_pass(logits, step, tokens, last)
                    continue
                rows, positions = step[Field.ROW], step[Field.SEQ_LEN]
                drawn = self._rows_draw.draw(self._draw.whole(logits), rows, positions, tokens, last)
                self._rows_draw.note(drawn, rows, positions, step[Field.NUM_DRAWS])

        return steps

    def _padding_of_run(self, width: int, length: int) -> Int32:
        fields = np.zeros((length, LINES, width), np.int32)
        fields[:, : len(Field)] = self._padding(width)
        return fields

    def _record(self, width: int) -> None:
        super()._record(width)
        for length in self._lengths_for(width):
            for is_special in (False, True):
                self._recorded_run(width, length, is_special)

    def _rehearse_graphs(self) -> None:
        """As `GraphRunner`. What steps of a run launch does not depend on which of them they are."""
        super()._rehearse_graphs()
        for width in self._graphs.widths:
            for is_special in (False, True):
                fields = torch.from_numpy(self._padding_of_run(width, 1)).to(self._setup.device)
                self._run_work(is_special)(fields)


def parts(count: int, lengths: list[int]) -> Iterator[int]:
    """`count` as a sum of `lengths`, which descend to 1, the longest first."""
    for n in lengths:
        yield from [n] * (count // n)
        count %= n
