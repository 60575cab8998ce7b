"""Qwen3-MoE (Qwen3-30B-A3B): Qwen3's attention, 128 experts of which each token asks 8."""

from __future__ import annotations

from folovllm.models.qwen3 import Qwen3Attention
from folovllm.moe.models import MoeForCausalLM


class Qwen3MoeForCausalLM(MoeForCausalLM):
    """The frame with Qwen3's attention."""

    attention_class = Qwen3Attention
