"""The gate of the MLP."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class SiluAndMul(nn.Module):
    """SwiGLU's element-wise part (Shazeer 2020, "GLU Variants Improve Transformer")."""

    def forward(self, gate_up: torch.Tensor) -> torch.Tensor:
        """[T, 2I] -> [T, I]: silu(first half) * second half."""
        gate, up = gate_up.chunk(2, dim=-1)  # [T, I] each
        return F.silu(gate) * up
