"""Tiny models with experts, one of each family."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from folovllm import EngineConfig
from folovllm.engine.setup import set_up
from folovllm.models.loader import load_native_model
from folovllm.models.sharded_loader import load_sharded_model
from tests.helpers import tiny_checkpoint
from tests.m6.ranks import ThreadGroup, on_ranks

FAMILIES = {
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True},
    "qwen2_moe": {
        "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 40,
        "norm_topk_prob": False,
    },
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
}  # fmt: skip


def moe_checkpoint(family: str = "qwen3_moe", num_layers: int = 3) -> Path:
    """A random model of this family with its few experts."""
    return tiny_checkpoint(family, num_hidden_layers=num_layers, **FAMILIES[family])


def wide_checkpoint(num_layers: int) -> Path:
    """All sizes are multiples of 128."""
    return tiny_checkpoint(
        "qwen2_moe", num_heads=2, num_kv_heads=1, num_hidden_layers=num_layers, head_dim=64, hidden_size=128, num_experts=4,
        num_experts_per_tok=2, moe_intermediate_size=128, shared_expert_intermediate_size=128,
    )  # fmt: skip


def assert_ranks_have_experts(path: Path, expert_parallel: bool) -> None:
    """The experts of two ranks, which are threads, add up to those of the second layer of the whole model."""
    one = EngineConfig(model=str(path), device="cpu", use_tqdm=False)
    setup = set_up(replace(one, tensor_parallel_size=2, enable_expert_parallel=expert_parallel))
    whole: Any = load_native_model(set_up(one)).model.layers[1]
    x = torch.randn(9, setup.hf_config.hidden_size, generator=torch.Generator().manual_seed(0))

    def work(group: ThreadGroup) -> torch.Tensor:
        layer: Any = load_sharded_model(setup, group).model.layers[1]
        assert layer.mlp.experts.is_part == expert_parallel
        answer: torch.Tensor = layer.mlp(x)
        return answer

    with torch.inference_mode():
        for summed in on_ranks(2, work):
            torch.testing.assert_close(summed, whole.mlp(x), rtol=1e-4, atol=1e-4)
