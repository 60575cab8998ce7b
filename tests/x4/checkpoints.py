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


def wide_checkpoint(num_layers: int) -> Path:
    """All sizes are multiples of 128."""
    return tiny_checkpoint(
        "qwen2_moe", num_heads=2, num_kv_heads=1, num_hidden_layers=num_layers, head_dim=64, hidden_size=128, num_experts=4,
        num_experts_per_tok=2, moe_intermediate_size=128, shared_expert_intermediate_size=128,
    )  # fmt: skip
