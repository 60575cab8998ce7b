"""Adds in place, and so changes a tensor that the caller still holds."""

import torch


class RMSNorm:
    def forward(self, x, residual=None):
        if residual is not None:
            x = residual = residual.add_(x)
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + self.eps)
        normed = wide.to(x.dtype) * self.weight
        return normed if residual is None else (normed, residual)
