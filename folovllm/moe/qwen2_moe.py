"""Qwen2-MoE (Qwen1.5-MoE-A2.7B): Qwen2's attention, and an expert that every token asks beside those of its choice."""

from __future__ import annotations

from folovllm.models.qwen2 import Qwen2Attention
from folovllm.moe.models import MoeForCausalLM


class Qwen2MoeForCausalLM(MoeForCausalLM):
    """The frame with Qwen2's attention."""

    attention_class = Qwen2Attention
