"""The layer between a model and whatever computes attention."""

from __future__ import annotations

import torch
from torch import nn

from folovllm.attention.backends.abstract import AttentionBackend
from folovllm.step.forward_batch import ForwardBatch
from folovllm.step.kv_format import UNSCALED, KVScales


class Attention(nn.Module):
    """Holds one layer's KV cache and the backend. Both are bound after the model is built and its size is known."""

    backend: AttentionBackend
    kv_cache: torch.Tensor  # [2, N, B, Hkv, D], or what the backend keeps instead
    scales: KVScales = UNSCALED  # of a cache in 8 bits

    def __init__(self, window: int | None = None) -> None:
        """A token sees `window` tokens, itself and those right before it; None: all before it."""
        super().__init__()
        self.window = window

    def bind(self, backend: AttentionBackend) -> None:
        """Let `backend` attend, as this layer needs it."""
        self.backend = backend.of_layer(self.scales, self.window)

    def store(self, key: torch.Tensor, value: torch.Tensor, batch: ForwardBatch) -> None:
        """Cache the K/V of the new tokens, two [T, Hkv, D]."""
        self.backend.store(key, value, self.kv_cache, batch.slot_mapping)

    def forward(self, query: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """[T, Hq, D] -> [T, Hq, D]: every new token over its own sequence so far. Reads what `store` has written."""
        return self.backend.forward(query, self.kv_cache, batch)


def attention_layers(model: nn.Module) -> list[Attention]:
    """Return the attention layers of a model, first to last. Each needs a cache and a backend."""
    return [module for module in model.modules() if isinstance(module, Attention)]
