"""Passes the old residual on instead of the sum: every block's output is forgotten."""

import torch


class RMSNorm:
    def forward(self, x, residual=None):
        total = x if residual is None else x + residual
        wide = total.float()
        wide = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + self.eps)
        normed = wide.to(x.dtype) * self.weight
        return normed if residual is None else (normed, residual)
