"""Layers whose element-wise work is one Triton kernel instead of several torch operations: same contracts."""

from __future__ import annotations

import torch

from folovllm.kernels.activation import gelu_and_mul, silu_and_mul
from folovllm.kernels.rms_norm import add_rms_norm, rms_norm
from folovllm.layers.activation import GeluAndMul, SiluAndMul
from folovllm.layers.layernorm import RMSNorm


class FusedRMSNorm(RMSNorm):
    """Adds and norms in one pass."""

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        if residual is None:
            return rms_norm(x.flatten(0, -2), self.weight, self.eps).view(x.shape)  # heads are rows too
        return add_rms_norm(x, residual, self.weight, self.eps)


class FusedSiluAndMul(SiluAndMul):
    """Gates and multiplies in one pass."""

    def forward(self, gate_up: torch.Tensor) -> torch.Tensor:
        return silu_and_mul(gate_up)


class FusedGeluAndMul(GeluAndMul):
    """Gates and multiplies in one pass."""

    def forward(self, gate_up: torch.Tensor) -> torch.Tensor:
        return gelu_and_mul(gate_up)
