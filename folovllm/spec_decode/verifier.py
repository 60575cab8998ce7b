"""Verifies draft tokens where a step's tokens arrive: the runner's hook for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from folovllm.spec_decode.draft_tokens import DraftTokens
from folovllm.spec_decode.verify import accept
from folovllm.worker.pending_step import Ids


@dataclass(slots=True, frozen=True)
class DraftVerifier:
    """Accepts the longest prefix of a draft that was sampled.

    Attributes:
        num_samples: the most samples of a step with drafts, but for sequences that it admits.
        drafted: has the draft tokens that steps bring as placeholder ids, if any do.
    """

    num_samples: int
    drafted: DraftTokens | None = None

    def resolve_on_device(self, tokens: torch.Tensor) -> None:
        """As `Verifier`."""
        if self.drafted is not None:
            self.drafted.spell_on_device(tokens)

    def resolve(self, tokens: Ids) -> Ids:
        """As `Verifier`."""
        return tokens if self.drafted is None else self.drafted.spell(tokens)

    def accept(self, sampled: Sequence[int], draft: Sequence[int]) -> list[int]:
        """As `Verifier`."""
        return accept(sampled, draft)
