"""Qwen3: Llama with a norm on each query and key head, which keeps the scores in a range that bfloat16 can hold."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from folovllm.layers.layer_set import LayerSet
from folovllm.layers.layernorm import RMSNorm
from folovllm.layers.rotary_embedding import RotaryEmbedding
from folovllm.models.llama import LlamaAttention, LlamaDecoderLayer, LlamaForCausalLM, LlamaMLP, LlamaModel
from folovllm.step.forward_batch import ForwardBatch

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# transformers' names, for those who look for them here
Qwen3MLP = LlamaMLP
Qwen3DecoderLayer = LlamaDecoderLayer
Qwen3Model = LlamaModel


class Qwen3Attention(LlamaAttention):
    """Adds QK-norm: one weight [D] for all query heads of a layer, one for its key heads."""

    def __init__(
        self, config: PretrainedConfig, rope: RotaryEmbedding, layers: LayerSet, window: int | None = None
    ) -> None:
        super().__init__(config, rope, layers, window)
        self.q_norm = layers.make(RMSNorm, self.head_dim, config.rms_norm_eps)
        self.k_norm = layers.make(RMSNorm, self.head_dim, config.rms_norm_eps)

    def prepare(self, qkv: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """Do what `LlamaAttention.prepare` does, with the heads normalised before they are rotated."""
        query, key, value = self.split_heads(qkv)
        query, key = self.rope(batch.positions, self.q_norm(query), self.k_norm(key))
        self.attn.store(key, value, batch)
        return query


class Qwen3ForCausalLM(LlamaForCausalLM):
    """Llama's frame with Qwen3's attention."""

    attention_class = Qwen3Attention
