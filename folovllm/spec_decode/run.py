"""Several decode steps in one buffer: a row goes on from what it drew, and nobody looks at the tokens in between (X3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from folovllm.step.packed import Field, Int32, PackedStep, StepPacker, choose_bucket, is_plain_decode
from folovllm.step.schedule import SchedulerOutput

LINES = 12  # of a step: those of `Field`, and some that nobody reads, so that each begins at a multiple of 16 bytes


@dataclass(slots=True, frozen=True, eq=False)
class PackedRun:
    """Decode steps on the host, one behind the other.

    Attributes:
        fields: [n, LINES, width]; of each step the first lines are `PackedStep.fields`, padded to the width of the widest.
        num_seqs: [n], of each step.
        is_special: some sequence draws with filters.
    """

    fields: Int32
    num_seqs: list[int]
    is_special: bool


class RunPacker(StepPacker):
    """A `StepPacker` that packs several decode steps at once."""

    def __init__(self, num_rows: int, buckets: list[int]) -> None:
        super().__init__(num_rows, buckets)
        self._paddings = {width: padding_of_step(self.pack_decode([], width)) for width in buckets}

    def pack_run(self, outputs: Sequence[SchedulerOutput]) -> PackedRun:
        """Pack steps that run one behind the other.

        Raises:
            ValueError: a share is no plain decode (`is_plain_decode`), or asks for log-probabilities; or no recorded step is
                as wide.
        """
        every, num_seqs = [share for output in outputs for share in output.shares], [len(o.shares) for o in outputs]
        rows = {share.row for share in every}
        if not all(map(is_plain_decode, every)) or rows & self._logprobs.keys():
            raise ValueError("a run has decodes of one token, in rows that the device knows, and no log-probabilities")
        if not (width := choose_bucket(max(num_seqs), self._buckets)):
            raise ValueError(f"no recorded step holds {max(num_seqs)} sequences")
        packed = self.pack_decode(every, len(every)).fields
        fields = np.repeat(self._paddings[width], len(outputs), 0)
        start = 0
        for step, count in zip(fields, num_seqs, strict=True):
            step[: len(Field), :count] = packed[:, start : start + count]
            start += count
        return PackedRun(fields, num_seqs, not rows.isdisjoint(self._special))


def padding_of_step(nobody: PackedStep) -> Int32:
    """A step of a run in which nothing is done, [1, LINES, width], from a decode step of no sequences."""
    return np.pad(nobody.fields, ((0, LINES - len(Field)), (0, 0)))[None]
