"""A packed step on its way through the device: it has its logits, and then its tokens travel to the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from folovllm.sample.logprobs import SampledLogprobs, by_sequence
from folovllm.step.packed import NOTHING, PackedStep, Sample
from folovllm.step.sampling_spec import Logprobs
from folovllm.step.schedule import StepResult
from folovllm.worker.buckets import Bucket

Ids = npt.NDArray[np.signedinteger[Any]]


class Verifier(Protocol):
    """The hook for draft tokens: what they are, and how many of the tokens that were sampled behind them count."""

    num_samples: int  # the most of a step with drafts, but for sequences that it admits

    def resolve_on_device(self, tokens: torch.Tensor) -> None:
        """Replace placeholder ids in `tokens` [n] int32 by the tokens that they stand for. Device work only."""

    def resolve(self, tokens: Ids) -> Ids:
        """Return `tokens` [n] with what they stand for in place of placeholder ids. The host may wait."""

    def accept(self, sampled: Sequence[int], draft: Sequence[int]) -> list[int]:
        """Return those of the k + 1 `sampled` tokens that count, where the k tokens of `draft` were proposed."""


@dataclass(slots=True, frozen=True, eq=False)
class Computed:
    """A step that has its logits."""

    step: PackedStep
    logits: torch.Tensor  # [R, V]
    samples: torch.Tensor | None = None  # [len(Sample), R] on the device; None of a captured step, which has them
    scores: SampledLogprobs | None = None  # of prompts
    bucket: Bucket | None = None  # the captured step that was replayed, if it leaves its logits


@dataclass(slots=True, frozen=True, eq=False)
class PendingStep:
    """A step that was started. Its tokens are on the device, and on their way to the host."""

    step: PackedStep
    tokens: torch.Tensor  # [R] int64 in host memory, once `arrived`, and so are `logprobs` and `scores`
    arrived: torch.cuda.Event | None
    logprobs: SampledLogprobs | None
    scores: SampledLogprobs | None
    verifier: Verifier | None

    def is_here(self) -> bool:
        """Whether `wait` would return at once."""
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
        """The tokens of the samples that count, and their log-probabilities, in the lists of their `sequences`."""
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
        """Of each sequence the tokens that count behind its draft."""
        assert self.verifier is not None, "a step has drafts, and nobody verifies them"
        drafts: list[list[int]] = [[] for _ in sampled]
        for i, token in zip(sequences, self.verifier.resolve(self.step.samples[Sample.DRAFT]).tolist(), strict=True):
            if token != NOTHING:
                drafts[i].append(token)
        return [self.verifier.accept(own, draft) if own else [] for own, draft in zip(sampled, drafts, strict=True)]
