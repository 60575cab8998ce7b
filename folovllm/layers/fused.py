"""Layers whose element-wise work is one Triton kernel instead of several torch operations: same contracts."""

from __future__ import annotations

import torch

from folovllm.kernels.activation import silu_and_mul
from folovllm.kernels.grouped_linear import grouped_linear
from folovllm.kernels.rms_norm import add_rms_norm, rms_norm
from folovllm.layers.activation import SiluAndMul
from folovllm.layers.layernorm import RMSNorm
from folovllm.layers.moe import Experts


class FusedRMSNorm(RMSNorm):
    """Adds and norms in one pass."""

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """As `RMSNorm`."""
        if residual is None:
            return rms_norm(x.flatten(0, -2), self.weight, self.eps).view(x.shape)  # heads are rows too
        return add_rms_norm(x, residual, self.weight, self.eps)


class FusedSiluAndMul(SiluAndMul):
    """Gates and multiplies in one pass."""

    def forward(self, gate_up: torch.Tensor) -> torch.Tensor:
        """As `SiluAndMul`."""
        return silu_and_mul(gate_up)


class GroupedExperts(Experts):
    """All experts in two kernels, which find out on the device who has how many tokens."""

    def forward(self, x: torch.Tensor, order: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        """As `Experts`."""
        hidden = grouped_linear(x.contiguous(), self.gate_up, order, starts, gated=True)
        answers = x.new_zeros(len(order), x.shape[1]) if self.is_part else None
        return grouped_linear(hidden, self.down, order, starts, out=answers)
