"""The layers and the attention of a batch-invariant model on a GPU.

The engine's fused kernels for norms, activation and rotation have a program for each token, so they stay. Products and attention
have kernels of their own. Nothing here waits for the device, so steps can be captured.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from folovllm.attention.backends.abstract import AttentionBackend, AttentionConfig
from folovllm.electives.rollouts.kernels.attention import attention_tile, invariant_attention, tokens_of_tile
from folovllm.electives.rollouts.kernels.linear import invariant_linear
from folovllm.electives.rollouts.layers import InvariantLMHead, InvariantPlain, TiledRMSNorm
from folovllm.electives.rollouts.tiles import with_plain_backward
from folovllm.kernels.activation import silu_and_mul
from folovllm.kernels.prefill_tiles import list_tiles
from folovllm.kernels.rms_norm import add_rms_norm, rms_norm
from folovllm.kernels.store import store_kvcache
from folovllm.layers.activation import SiluAndMul
from folovllm.layers.embed_head import ParallelLMHead
from folovllm.layers.layer_set import LayerSet
from folovllm.layers.layernorm import RMSNorm
from folovllm.models.fused import ATTENTION
from folovllm.step.forward_batch import ForwardBatch


class InvariantTritonBackend(AttentionBackend):
    """One kernel for decodes and prompts. The device lists the tiles of each step."""

    name = "batch_invariant"
    supports_cuda_graph = True
    supports_prompt_graph = True

    def __init__(self, config: AttentionConfig) -> None:
        super().__init__(config)
        self._tile = attention_tile(config.device, config.head_dim, config.dtype.itemsize)
        self._tokens = tokens_of_tile(config.num_heads, config.num_kv_heads, self._tile.tile_m)
        self._tiles = torch.empty(0)  # [n, 2] int32, of the planned step

    def plan(self, batch: ForwardBatch) -> None:
        """List the tiles of all sequences."""
        self._tiles = list_tiles(batch.query_start_loc, batch.seq_lens, len(batch.input_ids), 0, self._tokens)

    def store(self, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        store_kvcache(key, value, kv_cache, slot_mapping)

    def forward(self, query: torch.Tensor, kv_cache: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        return invariant_attention(
            query, kv_cache, batch.query_start_loc, batch.seq_lens, batch.block_tables, self._tiles, self.config.scale,
            self._tile,
        )  # fmt: skip


class InvariantRMSNorm(TiledRMSNorm):
    """`FusedRMSNorm`, with gradients."""

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        result: torch.Tensor | tuple[torch.Tensor, torch.Tensor]
        if residual is None:
            result = with_plain_backward(self.fused, self.normed, x, self.weight)
        else:
            result = with_plain_backward(partial(add_rms_norm, eps=self.eps), self.added, x, residual, self.weight)
        return result

    def fused(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """[..., size] -> [..., size], by the kernel."""
        return rms_norm(x.flatten(0, -2), weight, self.eps).view(x.shape)

    def added(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the normalised sum, and the sum, by torch."""
        total = x + residual
        return self.normed(total, weight), total


class InvariantSiluAndMul(SiluAndMul):
    """`FusedSiluAndMul`, with gradients."""

    def forward(self, gate_up: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = with_plain_backward(silu_and_mul, super().forward, gate_up)
        return result


def kernel_layers() -> LayerSet:
    """Return the set of kernels whose result for a token does not depend on the batch."""
    linear = partial(with_plain_backward, invariant_linear, F.linear)
    places: dict[Any, Any] = {
        RMSNorm: InvariantRMSNorm, SiluAndMul: InvariantSiluAndMul, ParallelLMHead: partial(InvariantLMHead, linear),
    }  # fmt: skip
    return LayerSet(places | ATTENTION, InvariantPlain(linear), kernels=True)
