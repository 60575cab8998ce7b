"""What a draw must know of each running sequence, kept by row from the share that brings it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from folovllm.sample.penalties import TokenCounts
from folovllm.sample.sampler import SamplingBatch
from folovllm.step.draw import DrawSpec
from folovllm.step.schedule import Share, StepResult


class DrawRows:
    """The `DrawSpec` of every row, and the token counts of those with penalties.

    Counts live on the device and are brought up to date there, so that no draw has to wait for the one before it.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._specs: dict[int, DrawSpec] = {}
        self._counts: dict[int, TokenCounts] = {}
        self._special: set[int] = set()  # rows whose draw takes more than temperature and noise

    def set(self, new: Mapping[int, DrawSpec]) -> None:
        """Begin anew in the rows of `new`, whatever they held."""
        for row, spec in new.items():
            self._specs[row] = spec
            (self._special.discard if spec.is_plain else self._special.add)(row)
            self._counts.pop(row, None)
            if spec.has_penalties:
                self._counts[row] = TokenCounts(spec, self._vocab_size, self._device)

    def special(self, rows: Sequence[int]) -> list[int]:
        """Which of `rows`, by index, the one-pass draw cannot serve."""
        return [i for i, row in enumerate(rows) if row in self._special] if self._special else []

    def wants_logprobs(self, rows: Sequence[int]) -> bool:
        """Whether any of `rows` reports log-probabilities."""
        return any(self._specs[row].logprobs is not None for row in rows)

    def batch(self, rows: Sequence[int], positions: Sequence[int]) -> SamplingBatch:
        """The parameters of a draw for `rows`, whose tokens go to `positions`."""
        specs = [self._specs[row] for row in rows]
        return SamplingBatch.from_specs(specs, positions, self._device, [self._counts.get(row) for row in rows])

    def note_drawn(self, shares: Sequence[Share], result: StepResult) -> None:
        """Count the tokens of a result that is on the host."""
        if self._counts:
            for share, tokens in zip(shares, result.token_ids, strict=True):
                self.note([share.row] * len(tokens), torch.tensor(tokens, device=self._device))

    def note(self, rows: Sequence[int], tokens: torch.Tensor) -> None:
        """Count the tokens [n] that `rows` drew, and that belong to their answers."""
        if self._counts:
            for i, row in enumerate(rows):
                if (counts := self._counts.get(row)) is not None:
                    counts.note(tokens[i : i + 1])
