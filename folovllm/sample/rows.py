"""What a draw must know of each running sequence, kept by row from the share that brings it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from folovllm.draw_row import Int32
from folovllm.sample.penalties import TokenCounts
from folovllm.sample.rules import RowRules
from folovllm.sample.sampler import SamplingBatch
from folovllm.step.draw import DrawSpec
from folovllm.step.masks import Masks
from folovllm.step.schedule import Share, StepResult


class DrawRows:
    """The `DrawSpec` of every row, the token counts of those with penalties, and the rules of those with any."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._specs: dict[int, DrawSpec] = {}
        self._counts: dict[int, TokenCounts] = {}
        self._rules: dict[int, RowRules] = {}

    def set(self, new: Mapping[int, DrawSpec]) -> None:
        """Begin anew in the rows of `new`, whatever they held."""
        for row, spec in new.items():
            self._specs[row] = spec
            self._counts.pop(row, None)
            self._rules.pop(row, None)
            if spec.has_rules:
                self._rules[row] = RowRules(spec, self._vocab_size, self._device)
            if spec.has_penalties:
                self._counts[row] = TokenCounts(spec, self._vocab_size, self._device)

    def set_mask(self, row: int, mask: Int32) -> None:
        """A new mask [ceil(V / 32)] for `row`, whose spec has one, from the next draw on."""
        self._rules[row].set_mask(mask)

    def set_masks(self, masks: Masks | None) -> None:
        """New masks for the rows of a step, if it has any."""
        if masks is not None:
            for row, mask in zip(masks.rows.tolist(), masks.bits, strict=True):
                self.set_mask(row, mask)

    def batch(self, rows: Sequence[int], positions: Sequence[int]) -> SamplingBatch:
        """The parameters of a draw for `rows`, whose tokens go to `positions`."""
        specs = [self._specs[row] for row in rows]
        batch = SamplingBatch.from_specs(specs, positions, self._device, [self._counts.get(row) for row in rows])
        batch.rules = [self._rules.get(row) for row in rows]
        return batch

    def note_drawn(self, shares: Sequence[Share], result: StepResult) -> None:
        """Take in the tokens of answers with penalties or rules."""
        for share, tokens in zip(shares, result.token_ids, strict=True):
            if (rules := self._rules.get(share.row)) is not None:
                rules.note(tokens)
            if tokens and (counts := self._counts.get(share.row)) is not None:
                counts.note(torch.tensor(tokens, device=self._device))
