"""Weights as most checkpoints have them: one matrix, in the dtype of the model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

from folovllm.layers.linear_method import LinearMethod

if TYPE_CHECKING:
    from folovllm.layers.linear import LinearBase


class Plain(LinearMethod):
    """Keeps `weight` [outputs, inputs]; the library multiplies by it."""

    def create(self, layer: LinearBase) -> None:
        """Make one parameter, whose rows follow `output_sizes`."""
        layer.weight = nn.Parameter(torch.empty(sum(layer.output_sizes), layer.input_size))

    def places(self, layer: LinearBase) -> dict[str, Sequence[torch.Tensor]]:
        """The rows of each part."""
        return {"weight": torch.split(layer.weight.data, layer.output_sizes)}

    def product(self, layer: LinearBase, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """Multiply. Without a bias the addition is part of the library's product."""
        if residual is None:
            return F.linear(x, layer.weight, layer.bias)
        residual = residual.addmm_(x, layer.weight.t())
        return residual if layer.bias is None else residual.add_(layer.bias)

    def can_fold(self, layer: LinearBase) -> bool:
        """False with a bias, which a late division would scale, and in float16.

        Before it is divided, a result may be larger than float16 can hold.
        """
        return layer.bias is None and layer.weight.dtype != torch.float16

    def fold(self, layer: LinearBase, scale: torch.Tensor) -> None:
        layer.weight.data *= scale
