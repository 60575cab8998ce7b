"""Mistral: Llama's layers, some of which see no further than a sliding window (`windows_of`)."""

from __future__ import annotations

from folovllm.models.llama import LlamaForCausalLM


class MistralForCausalLM(LlamaForCausalLM):
    """Llama under Mistral's name."""
