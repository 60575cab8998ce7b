"""Plain weights, with a kernel of our own where the batch is small: it reaches the memory's bandwidth."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from folovllm.kernels.skinny_linear import serves, skinny_linear
from folovllm.kernels.summed_linear import fits, summed_linear
from folovllm.layers.linear import Plain

if TYPE_CHECKING:
    from folovllm.distributed.group import Group
    from folovllm.layers.linear import LinearBase


class SkinnyLinear(Plain):
    """With few tokens, the kernel of the product also applies the norm, the gate and the residual."""

    def fused(
        self, layer: LinearBase, x: torch.Tensor, norm_eps: float | None, gated: bool, residual: torch.Tensor | None
    ) -> torch.Tensor:
        return skinny_linear(x, layer.weight, norm_eps, gated, residual)

    def summed(
        self, layer: LinearBase, x: torch.Tensor, group: Group, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Multiply and add up over ranks, in one kernel where these have one-shot buffers."""
        if group.one_shot_buffers is not None and self.fuses(layer, x) and fits(len(x), layer.weight):
            return summed_linear(x, layer.weight, group.one_shot_buffers, residual)
        return super().summed(layer, x, group, residual)

    def fuses(self, layer: LinearBase, x: torch.Tensor) -> bool:
        """True for few tokens and no bias."""
        return layer.bias is None and is_few(x, layer.weight)


def is_few(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether `skinny_linear` should multiply these. In the interpreter its many programs would take minutes."""
    return x.is_cuda and serves(len(x), weight)
