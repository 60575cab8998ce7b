"""Sampling of the next token of every row: temperature, filters, noise, argmax. Penalties are `SamplerState.adjust`, of M6."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from folovllm.sample.filters import apply_min_p_filtering, apply_top_k_filtering, apply_top_p_filtering
from folovllm.sample.logprobs import logprobs_of_rows
from folovllm.sample.noise import gumbel
from folovllm.step.schedule import Logprobs, SamplingSpec


@dataclass(slots=True)
class SamplingBatch:
    """Per-row sampling parameters. A filter is None if no row uses it, and costs nothing then."""

    temperature: torch.Tensor  # [S] float32; 0 is greedy
    seeds: torch.Tensor  # [S] int64
    positions: torch.Tensor  # [S] int64, index of the token to sample in its sequence
    all_greedy: bool
    min_p: torch.Tensor | None = None  # [S]
    top_k: torch.Tensor | None = None  # [S]
    top_p: torch.Tensor | None = None  # [S]
    specs: Sequence[SamplingSpec] = ()  # [S]; they say which rows want log-probabilities

    @classmethod
    def from_specs(cls, specs: Sequence[SamplingSpec], positions: Sequence[int], device: torch.device) -> SamplingBatch:
        """Gather the parameters of the rows' requests."""

        def row(values: Sequence[float], dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype).to(device, non_blocking=True)

        return cls(
            temperature=row([spec.temperature for spec in specs]),
            seeds=row([spec.seed for spec in specs], torch.int64),
            positions=row(list(positions), torch.int64),
            all_greedy=all(spec.greedy for spec in specs),
            min_p=row([spec.min_p for spec in specs]) if any(spec.min_p > 0 for spec in specs) else None,
            top_k=row([spec.top_k for spec in specs], torch.int64) if any(spec.top_k > 0 for spec in specs) else None,
            top_p=row([spec.top_p for spec in specs]) if any(spec.top_p < 1 for spec in specs) else None,
            specs=specs,
        )


@dataclass(slots=True)
class SamplerOutput:
    token_ids: list[int]  # [S]
    logprobs: list[Logprobs | None]  # [S]; None if the request wants none


class Sampler:
    """Samples one token a row from logits `[S, V]`. It keeps no state: the noise is a function of (seed, position, token id)."""

    def __call__(
        self, logits: torch.Tensor, batch: SamplingBatch, adjusted: torch.Tensor | None = None
    ) -> SamplerOutput:
        """Sample a token for each row of `logits` [S, V], or of the `adjusted` logits if requests change logits or forbid tokens."""
        raw = logits.float()
        tokens = self.sample(raw if adjusted is None else adjusted, batch).tolist()
        if all(spec.logprobs is None for spec in batch.specs):
            return SamplerOutput(tokens, [None] * len(tokens))
        return SamplerOutput(tokens, logprobs_of_rows(raw, tokens, [spec.logprobs for spec in batch.specs]))

    def sample(self, logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
        """Filter adjusted `logits` [S, V] (`SamplerState.adjust`), and sample a token a row, [S]."""
        return self.sample_filtered(self.filter(logits, batch), batch)

    def filter(self, logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
        """Apply temperature, min_p, top_k and top_p to [S, V]. Greedy rows keep their scale, and no filter drops their maximum."""
        if batch.all_greedy:
            return logits
        logits = logits / torch.where(batch.temperature > 0, batch.temperature, 1.0)[:, None]
        if batch.min_p is not None:
            logits = apply_min_p_filtering(logits, batch.min_p)
        if batch.top_k is not None:
            logits = apply_top_k_filtering(logits, batch.top_k)
        if batch.top_p is not None:
            logits = apply_top_p_filtering(logits, batch.top_p)
        return logits

    def sample_filtered(self, logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
        """The next token of every row by the Gumbel-max trick.

        argmax(logits + noise) is a sample from softmax(logits) if the noise is `gumbel(seeds, positions, V)`: no softmax,
        no cumulative sum. Rows with temperature 0 add no noise, so the argmax is the greedy choice; if all rows are
        greedy no noise is made at all. Ties go to the lowest id, as argmax does.

        Args:
            logits: [S, V], filtered: what must not be sampled is -inf.

        Returns:
            [S] int64.
        """
        if batch.all_greedy:
            return logits.argmax(-1)
        noise = gumbel(batch.seeds, batch.positions, logits.shape[-1])  # [S, V]
        return (logits + noise * (batch.temperature > 0)[:, None]).argmax(-1)
