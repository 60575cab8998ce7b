"""A packed step in flight: first it has its logits, then its tokens are copied to the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from folovllm.sample.logprobs import SampledLogprobs, by_sequence
from folovllm.step.packed import NOTHING, PackedStep, Sample
from folovllm.step.schedule import Logprobs, StepResult
from folovllm.worker.buckets import Bucket

Ids = npt.NDArray[np.signedinteger[Any]]


class Verifier(Protocol):
    """The hook for draft tokens: it resolves their placeholder ids and decides which sampled tokens are accepted."""

    num_samples: int  # the most samples of a step with drafts, without those of newly admitted sequences

    def resolve_on_device(self, tokens: torch.Tensor) -> None:
        """Replace placeholder ids in `tokens` [n] int32 by the sampled token ids. Device work only."""

    def resolve(self, tokens: Ids) -> Ids:
        """Return `tokens` [n] with the sampled token ids in place of placeholder ids. The host may wait."""

    def accept(self, sampled: Sequence[int], draft: Sequence[int]) -> list[int]:
        """Return the accepted ones of the k + 1 `sampled` tokens, given the k tokens of `draft`."""


@dataclass(slots=True, frozen=True, eq=False)
class Computed:
    """A step that has its logits."""

    step: PackedStep
    logits: torch.Tensor  # [R, V]
    samples: torch.Tensor | None = None  # [len(Sample), R] on the device; None for a captured step: in its input
    scores: SampledLogprobs | None = None  # log-probabilities of prompt tokens
    bucket: Bucket | None = None  # the bucket of the captured step that was replayed up to its logits


@dataclass(slots=True, frozen=True, eq=False)
class PendingStep:
    """A step that was started. The copy of its tokens to the host is queued."""

    step: PackedStep
    tokens: torch.Tensor  # [R] int64 in host memory; like `logprobs` and `scores` it is complete after `arrived`
    arrived: torch.cuda.Event | None
    logprobs: SampledLogprobs | None
    scores: SampledLogprobs | None
    verifier: Verifier | None

    def is_here(self) -> bool:
        """Return whether `wait` would return at once."""
        return self.arrived is None or self.arrived.query()

    def wait(self) -> StepResult:
        """Wait for the tokens and return them."""
        if self.arrived is not None:
            self.arrived.synchronize()
        tokens = self.tokens.tolist()
        if self.step.is_decode and self.logprobs is None:
            return StepResult([[token] for token in tokens], {})
        sequences, counts = range(len(tokens)), [1] * len(tokens)
        if not self.step.is_decode:
            sequences, counts = self.step.samples[[Sample.SEQUENCE, Sample.COUNTS]].tolist()
        return self._by_sequence(tokens, sequences, counts)

    def _by_sequence(self, tokens: list[int], sequences: Sequence[int], counts: Sequence[int]) -> StepResult:
        """Return the result: tokens of the samples that count, and their log-probabilities, by sequence."""
        step = self.step
        sampled: list[list[int]] = [[] for _ in range(step.num_seqs)]
        place = []  # of each sample among those of its sequence
        for token, i, counted in zip(tokens, sequences, counts, strict=True):
            place.append(len(sampled[i]))
            if counted:
                sampled[i].append(token)
        if step.has_drafts:
            sampled = self._accepted(sampled, sequences)
        logprobs: dict[int, list[Logprobs]] = {}
        if self.scores is not None:
            logprobs = by_sequence(self.scores, step.scores.T.tolist())
        if self.logprobs is not None:
            for n, (r, k) in enumerate(step.logprobs.T.tolist()):
                if place[r] < len(sampled[i := sequences[r]]):
                    logprobs.setdefault(i, []).append(self.logprobs.of(n, k))
        return StepResult(sampled, logprobs)

    def _accepted(self, sampled: list[list[int]], sequences: Sequence[int]) -> list[list[int]]:
        """Return the accepted tokens of each sequence."""
        assert self.verifier is not None, "a step has drafts, and there is no verifier"
        drafts: list[list[int]] = [[] for _ in sampled]
        for i, token in zip(sequences, self.verifier.resolve(self.step.samples[Sample.DRAFT]).tolist(), strict=True):
            if token != NOTHING:
                drafts[i].append(token)
        return [self.verifier.accept(own, draft) if own else [] for own, draft in zip(sampled, drafts, strict=True)]
