"""A decoder layer for small kernels' sake: products that norm, activate and add as they go.

In a recorded step nothing waits for Python any more, and what is left between the large kernels is small kernels. These
layers have none for a norm or an addition, and with few tokens none for the activation or for the new K and V.
"""

from __future__ import annotations

from typing import TypeGuard

import torch
import torch.nn.functional as F
from torch import nn

from folovllm.forward_batch import ForwardBatch
from folovllm.kernels.activation import silu_and_mul
from folovllm.kernels.small_linear import serves, small_linear
from folovllm.layers.linear import LinearBase, QKVParallelLinear, RowParallelLinear
from folovllm.models.fused import FusedLlamaAttention, fuse
from folovllm.models.llama import LlamaDecoderLayer, LlamaMLP


def _few(x: torch.Tensor) -> bool:
    """Whether `small_linear` should take this batch: not in the interpreter, where its many programs take minutes."""
    return x.is_cuda and serves(len(x))


class FewTokensMLP(LlamaMLP):
    """Gate, up and activation in one kernel where the batch is small."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """As `LlamaMLP`."""
        if _few(x) and self.gate_up_proj.bias is None:
            return self.down_proj(small_linear(x, self.gate_up_proj.weight, gated=True))
        return super().forward(x)


class FewTokensLinear(LinearBase):
    """Few tokens: all bandwidth, no library."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """As `LinearBase`."""
        return small_linear(x, self.weight) if _few(x) and self.bias is None else super().forward(x)


class FewTokensQKVLinear(FewTokensLinear, QKVParallelLinear):
    """All of it is inherited."""


class AddingRowLinear(FewTokensLinear, RowParallelLinear):
    """Can add its result to the residual stream as it is written."""

    def add_to(self, stream: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """stream + forward(x), [T, outputs], where there is no bias; `stream` may be overwritten."""
        if _few(x):
            return small_linear(x, self.weight, residual=stream)
        return stream.addmm_(x, self.weight.t())


class LateNormDecoderLayer(LlamaDecoderLayer):
    """No norm and no addition is a kernel of its own: four matrix products, attention, and a pass before and after it.
    With few tokens a decode has not even those.

    RMSNorm multiplies each column by a weight and divides each row by one number. The weights move into the projection
    that follows (`fold_norms`). The division commutes with the projection, and waits for whoever reads its result next.
    The projections back add to the residual stream as they write, so the stream arrives and leaves whole.
    """

    folded = False

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, batch: ForwardBatch
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The stream [T, H] -> the stream, written over, and None: nothing is left to be added.

        Where that cannot be, with float16, biases or several ranks, as `LlamaDecoderLayer`.
        """
        attention, mlp = self.self_attn, self.mlp
        o_proj, down_proj = attention.o_proj, mlp.down_proj
        if not (
            self.folded and isinstance(attention, FusedLlamaAttention) and _can_add(o_proj) and _can_add(down_proj)
        ):
            return super().forward(x, residual, batch)
        qkv_weight, eps = attention.qkv_proj.weight, self.input_layernorm.eps
        if _few(x):
            attended = attend(attention, small_linear(x, qkv_weight, eps), batch)
        else:
            attended = attention.attn(attention.prepare(F.linear(x, qkv_weight), batch, x, eps), batch)
        x = o_proj.add_to(x, attended.flatten(1))
        gate_up_weight, eps = mlp.gate_up_proj.weight, self.post_attention_layernorm.eps
        if _few(x):
            hidden = small_linear(x, gate_up_weight, eps, gated=True)
        else:
            hidden = silu_and_mul(F.linear(x, gate_up_weight), x, eps)
        return down_proj.add_to(x, hidden), None

    def fold_norms(self) -> None:
        """(x * g) W^T is x (W * g)^T: the norms' weights go into the projections' columns, and become ones.

        Not with a bias, which the late division would scale, and not in float16: before it is divided, a result may be
        larger than that can hold.
        """
        pairs = (
            (self.input_layernorm, self.self_attn.qkv_proj),
            (self.post_attention_layernorm, self.mlp.gate_up_proj),
        )
        if any(linear.bias is not None or linear.weight.dtype == torch.float16 for _, linear in pairs):
            return
        for norm, linear in pairs:
            linear.weight.data *= norm.weight.data
            norm.weight.data.fill_(1)
        self.folded = True


def attend(attention: FusedLlamaAttention, qkv: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
    """From the projection [T, (Hq + 2 Hkv) D] to attention's result [T, Hq, D]: for decodes one kernel, if there is one.

    For few sequences: its programs begin later, and at large batch thousands of them would (`docs/performance_log.md`).
    """
    attn = attention.attn
    if batch.num_decodes == batch.num_seqs:
        out = attn.backend.forward_raw(qkv, attention.preparation(), attn.kv_cache, batch)
        if out is not None:
            return out
    return attn(attention.prepare(qkv, batch), batch)


def _can_add(layer: RowParallelLinear) -> TypeGuard[AddingRowLinear]:
    """Not with a bias, and not where ranks must first add up among themselves, which their subclasses do."""
    return type(layer) is AddingRowLinear and layer.bias is None


TWINS: dict[type[nn.Module], type[nn.Module]] = {
    QKVParallelLinear: FewTokensQKVLinear,
    RowParallelLinear: AddingRowLinear,
    LlamaMLP: FewTokensMLP,
    LlamaDecoderLayer: LateNormDecoderLayer,
}


def fuse_layers(model: nn.Module) -> None:
    """After `fuse`: turn the decoder layers into these, in place. The weights of their norms move."""
    fuse(model, TWINS)
    for module in model.modules():
        if isinstance(module, LateNormDecoderLayer):
            module.fold_norms()
