"""Tiny hybrid models: those of each family, and random geometries."""

import random
import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from tests.helpers import hf_model, tiny_checkpoint

KINDS = {"L": "linear_attention", "F": "full_attention"}
EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 24
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_next": {"num_experts": 0}, "qwen3_5_text": {},
    "qwen3_next with experts": EXPERTS, "qwen3_5_moe_text": EXPERTS,
}  # fmt: skip


def hybrid_checkpoint(family: str = "qwen3_next", layers: str = "LLF", **overrides: Any) -> Path:
    """A random model with layers of these kinds; each key head of linear attention serves two value heads."""
    fields: dict[str, Any] = {
        "num_hidden_layers": len(layers), "layer_types": [KINDS[kind] for kind in layers],
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 8,
        "linear_conv_kernel_dim": 4, **FAMILIES[family], **overrides,
    }  # fmt: skip
    return tiny_checkpoint(family.split()[0], **fields)


@cache
def stacked_checkpoint() -> Path:
    """A model whose experts are in stacks, as Qwen3.5 is published; transformers writes them so on request."""
    single, folder = hybrid_checkpoint("qwen3_5_moe_text"), Path(tempfile.mkdtemp()) / "model"
    shutil.copytree(single, folder)
    hf_model(single).save_pretrained(folder, save_original_format=False)
    return folder


def random_geometry(seed: int, may_tie: bool = True) -> Path:
    """A model of any family with sizes that fit together, and nothing else in common with the next one.

    `may_tie`: whether it may share its embedding with its head, as every second does. Such a model may repeat one token.
    """
    rng = random.Random(seed)
    heads, kv_heads = rng.choice([(4, 2), (2, 1), (3, 3), (6, 2)])
    key_heads = rng.choice([1, 2, 3])
    return hybrid_checkpoint(
        rng.choice(sorted(FAMILIES)), rng.choice(["LLF", "LF", "FL", "LLFL", "LFLF", "LL" + "F" * 2]),
        num_heads=heads, num_kv_heads=kv_heads, head_dim=rng.choice([16, 32]), tied=rng.random() < 0.5 and may_tie,
        linear_num_key_heads=key_heads, linear_num_value_heads=key_heads * rng.choice([1, 2, 3]),
        linear_key_head_dim=rng.choice([8, 16, 24]), linear_value_head_dim=rng.choice([8, 16, 40]),
        linear_conv_kernel_dim=rng.choice([2, 3, 4]), partial_rotary_factor=rng.choice([0.25, 0.5, 1.0]),
    )  # fmt: skip
