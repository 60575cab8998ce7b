"""The options of rollouts (X6), which are keywords of `EngineConfig`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from folovllm.config import EngineConfig


@dataclass(slots=True, kw_only=True)
class RolloutOptions:
    """Whether results depend on the batch.

    Attributes:
        batch_invariant: compute each request with the same bits whatever else is in the batch. It is slower.
    """

    batch_invariant: bool = False

    def check(self, config: EngineConfig) -> None:
        """What it does not go with depends on the model: `BatchInvariance`."""
