"""A `GraphRunner` that also takes runs: decode steps of which nobody sees the tokens before the last has drawn (X3).

Each recording has some steps, and a run is put together of these: 7 steps are 4, 2 and 1. So there are few to record, and each
has lines of its own for its tokens. A recording begins with the copy of its input from the host and ends with the copy of its
tokens to the host, so that a run costs the host a launch or two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from folovllm.setup import EngineSetup
from folovllm.spec_decode.draft_tokens import DraftTokens
from folovllm.spec_decode.run import PackedRun, padding_of_step
from folovllm.step.masks import Masks
from folovllm.step.packed import Field, Int32, PackedStep, StepPacker
from folovllm.step.schedule import StepResult
from folovllm.worker.graph_runner import GraphRunner
from folovllm.worker.model_runner import ModelRunner
from folovllm.worker.step_graph import StepGraph

WIDEST = 32  # sequences of a recorded run: beyond, a step takes the device much longer than the host takes to start it


class PendingRun:
    """A run that was started. Its tokens are in `drafted`, in these `lines`."""

    def __init__(self, num_seqs: list[int], lines: list[int], drafted: DraftTokens) -> None:
        self._num_seqs, self._lines, self._drafted = num_seqs, lines, drafted

    @property
    def names(self) -> Int32:
        """The names of the tokens that step j draws for its share i, [j, i]."""
        return self._drafted.names[self._lines]

    def wait(self) -> list[StepResult]:
        """Wait for the last token and return what each step drew."""
        drawn = self._drafted.spell(self.names[:, : max(self._num_seqs)]).tolist()
        return [
            StepResult([[token] for token in tokens[:count]], {})
            for tokens, count in zip(drawn, self._num_seqs, strict=True)
        ]


class RunGraphRunner(GraphRunner):
    """Runs are recorded for the widths of decode steps, with draws in one pass and with those of any row."""

    def __init__(self, setup: EngineSetup, runner: ModelRunner, *others: Any, drafted: DraftTokens) -> None:
        """As `GraphRunner`. The tokens of runs go to `drafted`, whose lines are the most steps that a run may have."""
        super().__init__(setup, runner, *others)
        self._drafted = drafted
        self._out = torch.zeros(drafted.drawn.shape, dtype=torch.int64, device=setup.device)  # as kernels draw
        self._ended = torch.cuda.Event() if setup.device.type == "cuda" else None

    def execute_model(self, step: PackedStep | Masks | PackedRun) -> Any:
        """As `GraphRunner`; a run has a `PendingRun`."""
        return self._start_run(step) if isinstance(step, PackedRun) else super().execute_model(step)

    def _start_run(self, run: PackedRun) -> PendingRun:
        if self._drafted.arrived is not None:
            self._drafted.arrived.synchronize()  # the last run has read its input
        count, _, width = run.fields.shape
        lines: list[int] = []
        for n in parts(count):
            graph = self._recorded_run(width, n, run.is_special)
            graph.replay(torch.from_numpy(run.fields[len(lines) : len(lines) + n]))
            lines += range(n - 1, 2 * n - 1)
        if self._ended is not None:
            self._ended.record()
            self._drafted.arrived = self._ended
        return PendingRun(run.num_seqs, lines, self._drafted)

    def _recorded_run(self, width: int, length: int, is_special: bool) -> StepGraph:
        """The graph of so many steps. Records it now, with nothing but padding, if none is kept."""
        kind = f"{length} steps{' special' * is_special}"
        return self._graphs.get(width, kind, lambda: self._record_run(width, length, is_special))

    def _record_run(self, width: int, length: int, is_special: bool) -> StepGraph:
        fields = np.repeat(self._padding_of_step(width), length, 0)
        return self._recorder.record(fields, self._run_work(is_special), from_host=True)

    def _padding_of_step(self, width: int) -> Int32:
        return padding_of_step(StepPacker(self._setup.max_num_seqs, []).pack_decode([], width))

    def _run_work(self, is_special: bool) -> Callable[[torch.Tensor], None]:
        """The work of decode steps from their input [n, LINES, width] in host memory to their tokens there."""

        def steps(numbers: torch.Tensor) -> None:
            lines = slice(len(numbers) - 1, 2 * len(numbers) - 1)
            fields = numbers.to(self._setup.device, non_blocking=True)
            for step, tokens in zip(fields[:, : len(Field)], self._out[lines], strict=True):
                self._forward(step)
                self._draw_into(tokens, step, is_special)
            self._drafted.drawn[lines] = self._out[lines]
            self._drafted.host[lines].copy_(self._drafted.drawn[lines], non_blocking=True)

        return steps

    def _draw_into(self, tokens: torch.Tensor, fields: torch.Tensor, is_special: bool) -> None:
        """Draw for a decode step that has its logits, into `tokens` [rows] and to where the next step finds them."""
        logits, last = self._logits_of(fields), self._tables.last_token
        if not is_special:
            self._draw.one_pass(logits, fields, tokens, last)
            return
        rows, positions = fields[Field.ROW], fields[Field.SEQ_LEN]
        drawn = self._rows_draw.draw(self._draw.whole(logits), rows, positions, tokens, last)
        self._rows_draw.note(drawn, rows, positions, fields[Field.NUM_DRAWS])

    def _record(self, width: int) -> None:
        super()._record(width)
        for length in parts(len(self._drafted.drawn)):
            for is_special in (False, True):
                if width <= WIDEST:
                    self._recorded_run(width, length, is_special)

    def _rehearse_graphs(self) -> None:
        """As `GraphRunner`. What a step of a run launches does not depend on which of them it is."""
        super()._rehearse_graphs()
        for width in self._graphs.widths:
            for is_special in (False, True):
                self._run_work(is_special)(torch.from_numpy(self._padding_of_step(width)))


def parts(count: int) -> Iterator[int]:
    """`count` as a sum of powers of two, the largest first."""
    for bit in reversed(range(count.bit_length())):
        if count >> bit & 1:
            yield 1 << bit
