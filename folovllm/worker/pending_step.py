"""A packed step on its way through the device: it has its logits, and then its tokens travel to the host."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from folovllm.sample.logprobs import DrawnLogprobs, by_share
from folovllm.step.draw import Logprobs
from folovllm.step.packed import Field, PackedStep
from folovllm.step.schedule import StepResult


@dataclass(slots=True, frozen=True, eq=False)
class Computed:
    """A step that has its logits."""

    step: PackedStep
    logits: torch.Tensor  # [S, V], of a decode step with its padding
    fields: torch.Tensor  # [len(Field), S] on the device; of recorded work its input
    scores: DrawnLogprobs | None = None  # of prompts


class PendingStep:
    """A step that was started. Its tokens are on the device, and on their way to the host."""

    def __init__(
        self,
        step: PackedStep,
        tokens: torch.Tensor,
        arrived: torch.cuda.Event | None,
        logprobs: DrawnLogprobs | None,
        scores: DrawnLogprobs | None = None,
    ) -> None:
        self._num_draws: list[int] = step.fields[Field.NUM_DRAWS, : step.num_seqs].tolist()
        self._asked: list[list[int]] = step.logprobs.T.tolist()  # (index in the step, how many), for `logprobs`
        self._tokens = tokens  # [S] int64 in host memory, once `arrived`, and so are `logprobs` and `scores`
        self._arrived = arrived
        self._logprobs = logprobs
        self._wanted, self._scores = step.scores, scores

    def is_here(self) -> bool:
        """Whether `wait` would return at once."""
        return self._arrived is None or self._arrived.query()

    def wait(self) -> StepResult:
        """Wait for the tokens and return them."""
        if self._arrived is not None:
            self._arrived.synchronize()
        tokens = [[token] * drawn for token, drawn in zip(self._tokens.tolist(), self._num_draws, strict=True)]
        logprobs: dict[int, list[Logprobs]] = {}
        if self._scores is not None:
            logprobs = by_share(self._scores, self._wanted.T.tolist())
        if self._logprobs is not None:
            for n, (i, k) in enumerate(self._asked):
                logprobs.setdefault(i, []).append(self._logprobs.of(n, k))
        return StepResult(tokens, logprobs)
