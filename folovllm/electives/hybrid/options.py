"""The options of hybrid models (X5), which are keywords of `EngineConfig`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from folovllm.config import EngineConfig


@dataclass(slots=True, kw_only=True)
class HybridOptions:
    """Which states of linear attention are kept for later prefixes.

    Attributes:
        snapshot_interval: with prefix caching, in a model with layers of linear attention: keep a snapshot of a sequence's
            state every so many tokens, rounded up to whole blocks. A prefix is found up to its last snapshot.
        num_snapshots: the most snapshots that are kept; if left out, `max_num_seqs`, at least 16. Each takes as much memory as the state
            of a sequence.
    """

    snapshot_interval: int = 512
    num_snapshots: int | None = None

    def check(self, config: EngineConfig) -> None:
        """Any values fit."""
