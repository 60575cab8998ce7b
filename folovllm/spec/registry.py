"""Which proposer stands behind which name."""

from __future__ import annotations

from folovllm.setup import EngineSetup
from folovllm.spec.proposer import Depth, FixedDepth, Proposer
from folovllm.speculative_config import SpeculativeConfig


def make_proposer(config: SpeculativeConfig, setup: EngineSetup) -> Proposer:
    """The proposer of that name. Raises ValueError where it cannot be had."""
    if not isinstance(config.method, str):
        return config.method
    raise ValueError(f"speculative method {config.method!r} is not there yet")


def make_depth(config: SpeculativeConfig, setup: EngineSetup) -> Depth:
    """Who says how many tokens to guess."""
    return FixedDepth(config.num_speculative_tokens)
