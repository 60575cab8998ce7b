"""The layers of a batch-invariant model: no product, norm or activation computes a row in another way for another batch.

Here torch computes them in tiles of one size; `kernel_layers` has those for a GPU. The other operations are safe in any shape: a
sum or a product of two numbers, as in the rotation of heads and in the residual stream, is rounded in the same way everywhere.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F

from folovllm.electives.rollouts.tiles import Compute, in_tiles
from folovllm.layers.activation import SiluAndMul
from folovllm.layers.embed_head import ParallelLMHead
from folovllm.layers.fusable import FusablePlain
from folovllm.layers.layer_set import LayerSet
from folovllm.layers.layernorm import RMSNorm
from folovllm.layers.linear import LinearBase


class InvariantPlain(FusablePlain):
    """Plain weights; `linear(x, weight, bias)` is a product whose rows do not depend on the batch."""

    def __init__(self, linear: Compute) -> None:
        self._linear = linear

    def product(self, layer: LinearBase, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        bias = () if layer.bias is None else (layer.bias,)
        y: torch.Tensor = self._linear(x, layer.weight, *bias)
        return y if residual is None else residual + y


class InvariantLMHead(ParallelLMHead):
    """The product with the vocabulary, by `linear(x, weight)`, whose rows do not depend on the batch."""

    def __init__(self, linear: Compute, vocab_size: int, hidden_size: int) -> None:
        super().__init__(vocab_size, hidden_size)
        self._linear = linear

    def forward(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        logits: torch.Tensor = self._linear(hidden, self.weight)
        return logits if out is None else out.copy_(logits)


class TiledRMSNorm(RMSNorm):
    """An RMSNorm in tiles: the order in which torch adds up a row may depend on the number of rows."""

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        total = x if residual is None else x + residual
        normed = in_tiles(self.normed, total, self.weight)
        return normed if residual is None else (normed, total)

    def normed(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """[..., size] -> [..., size], with the mean and the division in float32."""
        return F.rms_norm(x.float(), weight.shape, eps=self.eps).to(x.dtype) * weight


class TiledSiluAndMul(SiluAndMul):
    """In tiles: the last numbers of a row, if they fill no vector register, go through another exponential function."""

    def forward(self, gate_up: torch.Tensor) -> torch.Tensor:
        return in_tiles(super().forward, gate_up)


def tiled_layers() -> LayerSet:
    """Return the set in which every layer whose kernel depends on the batch is tiled."""
    linear = partial(in_tiles, F.linear)
    head = partial(InvariantLMHead, linear)
    return LayerSet({RMSNorm: TiledRMSNorm, SiluAndMul: TiledSiluAndMul, ParallelLMHead: head}, InvariantPlain(linear))
