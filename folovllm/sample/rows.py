"""Sampling for runners on the host: it keeps how the running sequences are sampled, by row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from folovllm.sample.sampler import Sampler, SamplerOutput, SamplingBatch
from folovllm.sample.sampler_state import SamplerState, sample_adjusted
from folovllm.sample.sampling_row import pack_rows
from folovllm.step.schedule import Extras, SamplingSpec


class SamplingRows:
    """The `SamplingSpec` of every row; and M6's `SamplerState`, made when a row first has penalties, `min_tokens` or other rules for logits."""

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device, sampler: Sampler) -> None:
        self._num_rows, self._vocab_size, self._device, self._sampler = num_rows, vocab_size, device, sampler
        self._specs: dict[int, SamplingSpec] = {}
        self._state: SamplerState | None = None

    def set(self, new: Mapping[int, SamplingSpec]) -> None:
        """Replace the sampling state of the rows in `new`."""
        self._specs.update(new)
        # A first reading may skip the state: `SamplerState.adjust` shows the order of its rules.
        if self._state is None and any(spec.adjusts_logits for spec in new.values()):
            self._state = SamplerState(self._num_rows, self._vocab_size, self._device, use_kernels=False)
        if self._state is not None and new:
            update = pack_rows(new)
            buffer = torch.from_numpy(update.buffer).to(self._device)
            self._state.set_rows(buffer, update.num_rows, update.num_with_line)

    def sample(
        self,
        logits: torch.Tensor,
        rows: Sequence[int],
        positions: Sequence[int],
        counts: Sequence[int] | None = None,
        extras: Extras | None = None,
    ) -> SamplerOutput:
        """Sample a token for each of `rows` from its logits [S, V], at its position in the sequence; `SamplerState` records it.

        `counts`: 0 where the token is not part of the answer; None: all are. `extras`: those of the step, which may have bitmasks.
        """
        specs, device = [self._specs[row] for row in rows], self._device
        batch = SamplingBatch.from_specs(specs, positions, device)
        state = self._state
        if state is None or not any(spec.adjusts_logits for spec in specs):
            return self._sampler(logits, batch)
        return sample_adjusted(state, self._sampler, batch, logits, rows, positions, counts, extras)
