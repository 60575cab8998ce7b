"""Tiny models with experts, one of each family."""

from __future__ import annotations

from pathlib import Path

from tests.helpers import tiny_checkpoint

FAMILIES = {
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True},
    "qwen2_moe": {
        "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 40,
        "norm_topk_prob": False,
    },
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
}  # fmt: skip


def moe_checkpoint(family: str = "qwen3_moe") -> Path:
    """A random model of this family with its few experts."""
    return tiny_checkpoint(family, **FAMILIES[family])
