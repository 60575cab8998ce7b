"""RMSNorm, with the residual addition that comes before it in every decoder layer."""

from __future__ import annotations

import torch
from torch import nn


class RMSNorm(nn.Module):
    """Divide by the root mean square of the last dimension, then scale (Zhang and Sennrich 2019)."""

    def __init__(self, size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """x / sqrt(mean(x^2) + eps) * weight over the last dimension; `x` is [..., size].

        With a `residual` of the same shape the two are added first, and the pair (normalised sum, sum) comes back: the
        sum is the residual of the next addition. The mean and the division are done in float32; the result returns to
        the dtype of `x` before it is multiplied by the weight.
        """
        if residual is not None:
            x = residual = x + residual
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + self.eps)
        normed = wide.to(x.dtype) * self.weight
        return normed if residual is None else (normed, residual)
