"""A decoder layer without small kernels: its matrix products also norm, activate and add.

In a captured step nothing waits for Python any more, and what is left between the large kernels is small kernels. These
layers have none for a norm or an addition, and with few tokens none for the activation or for the new K and V.
"""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import torch

from folovllm.kernels.activation import silu_and_mul
from folovllm.kernels.pdl import MAX_TOKENS
from folovllm.kernels.skinny_linear import skinny_linear
from folovllm.layers.embed_head import ParallelLMHead
from folovllm.layers.fusable import fusable, fused, fuses
from folovllm.layers.layer_set import LayerSet
from folovllm.models.fused import FusedLlamaAttention, SkinnyLinear, can_use_skinny, fused_layers
from folovllm.models.llama import LlamaDecoderLayer, LlamaMLP, LlamaModel
from folovllm.step.forward_batch import ForwardBatch

MANY = 1024  # tokens that nobody reads: from here on the last layer leaves them out


class SkinnyMLP(LlamaMLP):
    """Computes gate, up and activation in one kernel where the batch is small."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if fuses(self.gate_up_proj, x):
            return self.down_proj(fused(self.gate_up_proj, x, gated=True))
        return super().forward(x)


class DeferredNormDecoderLayer(LlamaDecoderLayer):
    """Runs four matrix products, attention, and a pass before and after it; norms and additions are part of them.
    With few tokens a decode has not even those.

    RMSNorm multiplies each column by a weight and divides each row by one number. The weights move into the projection
    that follows (`weights_loaded`). The division commutes with the projection, and is left to what reads its result next.
    The projections back add to the residual stream as they write, so the stream arrives and leaves whole.
    """

    folded = False

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, batch: ForwardBatch
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The stream [T, H] -> the stream, written over, and None: nothing is left to be added.

        If the norms could not be folded (`weights_loaded`), it runs as `LlamaDecoderLayer`.
        """
        if not self.folded:
            return super().forward(x, residual, batch)
        attention, eps = cast(FusedLlamaAttention, self.self_attn), self.input_layernorm.eps
        if fuses(attention.qkv_proj, x):
            attended = attend(attention, fused(attention.qkv_proj, x, eps), batch)
        else:
            attended = attention.attn(attention.prepare(attention.qkv_proj(x), batch, x, eps), batch)
        return self.after_attention(x, attended), None

    def forward_last_tokens(self, x: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """The stream [T, H] -> that of each sequence's last token, [S, H]. All K/V are cached.

        The backend is planned anew, for a batch of decodes: so nothing may follow in this step.
        """
        attention = cast(FusedLlamaAttention, self.self_attn)
        query = attention.prepare(attention.qkv_proj(x), batch, x, self.input_layernorm.eps)
        rows, alone = batch.logits_indices, last_tokens(batch)
        attention.attn.backend.plan(alone)
        return self.after_attention(x[rows], attention.attn(query[rows], alone))

    def after_attention(self, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """Run o_proj on `attended` [N, Hq, D], then the MLP; both add to the residual stream `x` [N, H] in place."""
        attention, mlp = self.self_attn, self.mlp
        x = fused(attention.o_proj, attended.flatten(1), residual=x)
        eps = self.post_attention_layernorm.eps
        if fuses(mlp.gate_up_proj, x):
            hidden = fused(mlp.gate_up_proj, x, eps, gated=True)
        else:
            hidden = silu_and_mul(mlp.gate_up_proj(x), x, eps)
        return fused(mlp.down_proj, hidden, residual=x)

    def weights_loaded(self) -> None:
        """(x * g) W^T is x (W * g)^T: the norms' weights go into the projections' columns, and become ones.

        Not where a linear method or an attention class cannot do that, and only where the projections back can add to the
        stream: not with a bias.
        """
        pairs = (
            (self.input_layernorm, self.self_attn.qkv_proj),
            (self.post_attention_layernorm, self.mlp.gate_up_proj),
        )
        back = (self.self_attn.o_proj, self.mlp.down_proj)
        can_fold = all(fusable(linear.linear_method).can_fold(linear) for _, linear in pairs)
        has_bias = any(linear.bias is not None for linear in back)
        self.folded = can_fold and not has_bias and isinstance(self.self_attn, FusedLlamaAttention)
        for norm, linear in pairs if self.folded else ():
            fusable(linear.linear_method).fold(linear, norm.weight.data)
            norm.weight.data.fill_(1)


class LastTokensModel(LlamaModel):
    """Lets the last layer compute what is read of it: K and V of all tokens, and the rest for each sequence's last token."""

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Return the hidden states [T, H]; only those of last tokens, [S, H], if the others are many and not read."""
        last = self.layers[-1]
        left_out = len(batch.input_ids) - batch.num_seqs if batch.only_last else 0
        if left_out < MANY or not (isinstance(last, DeferredNormDecoderLayer) and last.folded):
            return super().forward(batch)
        x, residual = self.embed(batch.input_ids), None
        for layer in self.layers[:-1]:
            x, residual = layer(x, residual, batch)
        return self.norm(last.forward_last_tokens(x, batch))


def last_tokens(batch: ForwardBatch) -> ForwardBatch:
    """Each sequence's last token, as a batch of decodes."""
    n, at = batch.num_seqs, batch.logits_indices
    return replace(
        batch, input_ids=batch.input_ids[at], positions=batch.positions[at], slot_mapping=batch.slot_mapping[at],
        query_start_loc=torch.arange(n + 1, dtype=torch.int32, device=at.device),
        logits_indices=torch.arange(n, device=at.device), num_decodes=n, max_query_len=1, query_lens_host=[1] * n,
    )  # fmt: skip


def attend(attention: FusedLlamaAttention, qkv: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
    """From the projection [T, (Hq + 2 Hkv) D] to attention's result [T, Hq, D]: for decodes one kernel, if there is one.

    Not where a sequence may begin with what another one computes in this very step: programs of one kernel do not wait
    for each other. And for few sequences: its programs begin later, and at large batch thousands of them would
    (`docs/performance_log.md`).
    """
    attn = attention.attn
    if len(qkv) <= MAX_TOKENS and batch.num_decodes == batch.num_seqs and batch.is_disjoint:
        out = attn.backend.forward_raw(qkv, attention.preparation(), attn.kv_cache, batch)
        if out is not None:
            return out
    return attn(attention.prepare(qkv, batch), batch)


class SkinnyHead(ParallelLMHead):
    """The largest product of a step, by the kernel for few tokens where that is ahead."""

    def forward(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        if can_use_skinny(hidden, self.weight):
            return skinny_linear(hidden, self.weight, out=out)
        return super().forward(hidden, out)


def skinny_layers(head_dim: int) -> LayerSet:
    """Return the fused layers, with those of this file where they would leave small kernels between large ones."""
    late = {LlamaDecoderLayer: DeferredNormDecoderLayer, LlamaMLP: SkinnyMLP, ParallelLMHead: SkinnyHead,
            LlamaModel: LastTokensModel}  # fmt: skip
    return fused_layers(head_dim).having(late, SkinnyLinear())
