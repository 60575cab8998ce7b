"""The full attention of hybrid models: its output is gated, and RoPE rotates only a part of each head."""

from __future__ import annotations

import torch

from folovllm.layers.rotary_embedding import RotaryEmbedding
from folovllm.models.qwen3 import Qwen3Attention
from folovllm.step.forward_batch import ForwardBatch


class PartialRotaryEmbedding(RotaryEmbedding):
    """Rotates the first R dimensions of each head, and leaves the others as they are. The table of angles is [positions, R]."""

    def forward(
        self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        part = self.cos_sin_cache.shape[1]
        rotated = super().forward(positions, query[..., :part], key[..., :part])
        return torch.cat((rotated[0], query[..., part:]), -1), torch.cat((rotated[1], key[..., part:]), -1)


class GatedAttention(Qwen3Attention):
    """Multiplies the attention output of each head by the sigmoid of a gate. `q_proj` gives each head its query [D], then its gate [D]."""

    query_parts = 2

    def forward(self, x: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """[T, H] -> [T, H]."""
        qkv = self.qkv_proj(x)
        gate = qkv.view(len(qkv), -1, self.head_dim)[:, 1 : 2 * self.num_heads : 2]  # [T, Hq, D]
        attended = self.attn(self.prepare(qkv, batch), batch)
        return self.o_proj((attended * gate.sigmoid()).flatten(1))

    def split_heads(self, qkv: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """[T, 2 (Hq + Hkv) D] -> views [T, Hq, D], [T, Hkv, D], [T, Hkv, D]."""
        heads = qkv.view(len(qkv), -1, self.head_dim)
        sizes = [2 * self.num_heads, self.num_kv_heads, self.num_kv_heads]
        queries, key, value = torch.split(heads, sizes, dim=1)
        return queries[:, ::2], key, value
