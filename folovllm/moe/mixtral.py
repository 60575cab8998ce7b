"""Mixtral (8x7B, 8x22B; Jiang et al. 2024): Mistral with 8 experts of which each token asks 2, under other names."""

from __future__ import annotations

from typing import ClassVar

from folovllm.moe.models import MoeForCausalLM


class MixtralForCausalLM(MoeForCausalLM):
    """The frame with Llama's attention."""

    renamed: ClassVar[dict[str, str]] = {
        ".block_sparse_moe.": ".mlp.",
        ".w1.": ".gate_proj.",
        ".w3.": ".up_proj.",
        ".w2.": ".down_proj.",
    }
