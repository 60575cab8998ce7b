"""What becomes of a packed step: it has its logits, and then its result, sequence by sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from folovllm.sample.logprobs import SampledLogprobs, by_sequence
from folovllm.step.packed import PackedStep, Sample
from folovllm.step.schedule import StepResult
from folovllm.worker.buckets import Bucket

Ids = npt.NDArray[np.signedinteger[Any]]


class Verifier(Protocol):
    """The hook for draft tokens: it resolves their placeholder ids, and decides which sampled tokens are accepted."""

    num_samples: int  # the most samples of a step with drafts, without those of newly admitted sequences

    def resolve_on_device(self, tokens: torch.Tensor) -> None:
        """Replace placeholder ids in `tokens` [n] int32 by the sampled token ids. Device work only."""

    def accepted(self, sampled: list[list[int]], sequences: Sequence[int], tokens: Ids) -> list[list[int]]:
        """Return the accepted ones of the `sampled` tokens of each sequence. The host may wait.

        `sequences` [R]: the sequence of each sample. `tokens` [R]: the draft token at each sample, or NOTHING.
        """

    def buckets(self) -> list[Bucket]:
        """Return the padded shapes for captured steps with drafts, small ones first."""

    def warm_up(self, runner: Any) -> None:
        """Have a `GraphRunner` run small steps with drafts, so that their kernels are compiled before the first request."""


@dataclass(slots=True, frozen=True, eq=False)
class Computed:
    """A step that has its logits."""

    step: PackedStep
    logits: torch.Tensor  # [R, V]
    samples: torch.Tensor | None = None  # [len(Sample), R] on the device; None for a captured step: in its input
    scores: SampledLogprobs | None = None  # log-probabilities of prompt tokens
    bucket: Bucket | None = None  # the bucket of the captured step that was replayed up to its logits


def result_of(
    step: PackedStep,
    tokens: list[int],
    logprobs: SampledLogprobs | None,
    scores: SampledLogprobs | None,
    verifier: Verifier | None,
) -> StepResult:
    """Return what a step sampled, sequence by sequence: the `tokens` [R] of samples that count, and log-probabilities."""
    sequences, counts = range(len(tokens)), [1] * len(tokens)
    if not step.is_decode:
        sequences, counts = step.samples[[Sample.SEQUENCE, Sample.COUNTS]].tolist()
    sampled: list[list[int]] = [[] for _ in range(step.num_seqs)]
    place = []  # of each sample among those of its sequence
    for token, i, counted in zip(tokens, sequences, counts, strict=True):
        place.append(len(sampled[i]))
        if counted:
            sampled[i].append(token)
    if step.has_drafts:
        assert verifier is not None, "a step has drafts, and there is no verifier"
        sampled = verifier.accepted(sampled, sequences, step.samples[Sample.DRAFT])
    found = {} if scores is None else by_sequence(scores, step.scores.T.tolist())
    if logprobs is not None:
        for n, (r, k) in enumerate(step.logprobs.T.tolist()):
            if place[r] < len(sampled[i := sequences[r]]):
                found.setdefault(i, []).append(logprobs.of(n, k))
    return StepResult(sampled, found)
