"""The runner's hook that verifies draft tokens when a step's tokens arrive."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from folovllm.spec_decode.draft_tokens import DraftTokens
from folovllm.spec_decode.verify import accept
from folovllm.worker.pending_step import Ids


@dataclass(slots=True, frozen=True)
class DraftVerifier:
    """Accepts the draft tokens that were sampled, and resolves placeholder ids.

    Attributes:
        num_samples: the most samples of a step with drafts, without those of sequences that it admits.
        drafted: the draft tokens behind the placeholder ids of a step, if steps bring any.
    """

    num_samples: int
    drafted: DraftTokens | None = None

    def resolve_on_device(self, tokens: torch.Tensor) -> None:
        if self.drafted is not None:
            self.drafted.resolve_on_device(tokens)

    def resolve(self, tokens: Ids) -> Ids:
        return tokens if self.drafted is None else self.drafted.resolve(tokens)

    def accept(self, sampled: Sequence[int], draft: Sequence[int]) -> list[int]:
        return accept(sampled, draft)
