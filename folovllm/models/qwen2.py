"""Qwen2 and Qwen2.5: Llama with a bias on the query, key and value projections, and on nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING

from folovllm.models.llama import LlamaAttention, LlamaForCausalLM

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class Qwen2Attention(LlamaAttention):
    """Says where the architecture has biases; the config does not say it."""

    @staticmethod
    def biases(config: PretrainedConfig) -> tuple[bool, bool]:
        return True, False


class Qwen2ForCausalLM(LlamaForCausalLM):
    """Llama's frame with Qwen2's attention."""

    attention_class = Qwen2Attention
