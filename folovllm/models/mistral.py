"""Mistral: Llama's layers. Its sliding window, where there is one, bounds the context (`context_limit`)."""

from __future__ import annotations

from folovllm.models.llama import LlamaForCausalLM


class MistralForCausalLM(LlamaForCausalLM):
    """Llama under Mistral's name."""
