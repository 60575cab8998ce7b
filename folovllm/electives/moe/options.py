"""The options of mixtures of experts (X4), which are keywords of `EngineConfig`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from folovllm.models.model_config import num_experts_of

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

    @staticmethod
    def check_model(extras: Mapping[str, Any], hf_config: Any) -> None:
        """Raise ValueError if this is asked for, and the model is no mixture of experts."""
        if extras.get("enable_expert_parallel") and not num_experts_of(hf_config):
            raise ValueError("enable_expert_parallel shares out experts, and this model has none: leave it out")
        if extras.get("count_experts") and not num_experts_of(hf_config):
            raise ValueError("count_experts counts how often experts are asked, and this model has none: leave it out")
