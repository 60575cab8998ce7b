"""The layers of hybrid models with Triton kernels: Gated DeltaNet decodes in three launches between its projections."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from triton import cdiv

from folovllm.electives.hybrid.gated_attention import GatedAttention
from folovllm.electives.hybrid.gated_delta_net import GatedDeltaNet, GatedRMSNorm
from folovllm.electives.hybrid.kernels.delta_rule import BLOCK_DV, DeltaHeads, delta_rule
from folovllm.electives.hybrid.kernels.gated_norm import gated_norm
from folovllm.electives.hybrid.kernels.short_conv import short_conv
from folovllm.electives.hybrid.state_layer import Shape
from folovllm.layers.layer_set import LayerSet
from folovllm.models.fused import FusedQwen3Attention
from folovllm.step.forward_batch import ForwardBatch

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class FusedGatedDeltaNet(GatedDeltaNet):
    """Computes the whole batch by two kernels, where `GatedDeltaNet` goes from sequence to sequence."""

    def __init__(self, config: PretrainedConfig, layers: LayerSet, is_one_tensor: bool = False) -> None:
        super().__init__(config, layers, is_one_tensor)
        self.heads = DeltaHeads(self.num_k_heads, self.num_v_heads, self.k_dim, self.v_dim)

    def state_shapes(self) -> tuple[Shape, ...]:
        """The last inputs in a ring (`kernels.inputs`), the matrices, and what each part of these has seen, if inputs are kept."""
        (last, matrices, *kept), columns = super().state_shapes(), cdiv(self.v_dim, BLOCK_DV)
        (_, channels), dtype = kept[0] if kept else last
        ring: Shape = (max(1, self.conv1d.weight.shape[2] - 1 + 2 * self.most_kept), channels), dtype
        return ring, matrices, *([((self.num_v_heads, columns), torch.int32)] if kept else [])

    def forward_core(self, qkv: torch.Tensor, b: torch.Tensor, a: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """Convolve and apply the delta rule: [T, C] -> [T, Hv, Dv] in the dtype of the model. The states of `batch.rows` change in place.

        With drafts the delta rule first goes through the inputs of accepted tokens, which the ring still holds: so a second call
        of the convolution, behind it, stores those of sequences with more than `most_kept` new tokens, and computes nothing.
        """
        assert batch.rows is not None
        ring, state, *num_seen = self.states
        shape = batch.query_start_loc, batch.seq_lens, batch.rows, batch.num_decodes, batch.max_query_len
        conv = qkv, ring, self.conv1d.weight, *shape, self.most_kept
        mixed, gates = short_conv(*conv), (a, b, self.A_log, self.dt_bias)
        if not num_seen:
            return delta_rule(mixed, gates, state, self.heads, *shape)
        # A captured step with drafts spares the launches for prompts, which are rare there, and short.
        few = batch.max_query_len if batch.has_drafts else self.most_kept
        out = delta_rule(mixed, gates, state, self.heads, *shape, (ring, self.conv1d.weight, *num_seen), few)
        short_conv(*conv, out=mixed)
        return out


class FusedGatedRMSNorm(GatedRMSNorm):
    """Norms and gates in one pass."""

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return gated_norm(x, gate, self.weight, self.eps)


class FusedGatedAttention(FusedQwen3Attention, GatedAttention):
    """Norms, rotates and stores in one pass."""


def hybrid_kernels(head_dim: int) -> dict[type[nn.Module], type[nn.Module]]:
    """Return the fused class of each layer class. The attention kernel needs a `head_dim` that is a power of two."""
    attention = {GatedAttention: FusedGatedAttention} if head_dim & (head_dim - 1) == 0 else {}
    return attention | {GatedRMSNorm: FusedGatedRMSNorm, GatedDeltaNet: FusedGatedDeltaNet}
