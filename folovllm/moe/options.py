"""The options of mixtures of experts (X4), which are keywords of `EngineConfig`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from folovllm.config import EngineConfig


@dataclass(slots=True, kw_only=True)
class ExpertOptions:
    """How experts are shared out, and whether they are counted.

    Attributes:
        enable_expert_parallel: in a mixture of experts, each GPU of several holds some experts whole, not a part of each.
        count_experts: in a mixture of experts, count the tokens routed to each expert, for `/metrics` and `--show-steps`.
    """

    enable_expert_parallel: bool = False
    count_experts: bool = False

    def check(self, config: EngineConfig) -> None:
        """Raise ValueError where these do not fit the rest of the configuration."""
        if self.count_experts and config.kv_cache == "growing":
            raise ValueError("count_experts needs batches: take milestone m2 or later")
