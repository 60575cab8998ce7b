"""The gate of Gemma's MLP."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class GeluAndMul(nn.Module):
    """GEGLU's element-wise part (Shazeer 2020), with GELU as tanh approximates it."""

    def forward(self, gate_up: torch.Tensor) -> torch.Tensor:
        """[T, 2I] -> [T, I]: gelu(first half) * second half."""
        gate, up = gate_up.chunk(2, dim=-1)  # [T, I] each
        return F.gelu(gate, approximate="tanh") * up
