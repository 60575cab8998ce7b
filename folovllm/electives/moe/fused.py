"""A mixture of experts in few kernels: choose and sort, gate and up of all experts, down of all experts, add up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from folovllm.electives.moe.kernels.grouped_linear import grouped_linear
from folovllm.electives.moe.kernels.route import choose, combine
from folovllm.electives.moe.layers import Experts, MoE
from folovllm.electives.moe.quantized import GroupedQuantizedExperts, QuantizedExperts


class FusedMoE(MoE):
    """The choice and the sum by kernels of their own."""

    def choose(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        weights, experts, order, starts = choose(self.gate(x), self.top_k, self.normalise, self.held)
        self.load.record(experts)
        return weights, order, starts

    def combine(self, answers: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return combine(answers, weights)


class GroupedExperts(Experts):
    """All experts in two kernels, which find out on the device who has how many tokens."""

    def forward(self, x: torch.Tensor, order: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        hidden = grouped_linear(x.contiguous(), self.gate_up, order, starts, gated=True)
        answers = x.new_zeros(len(order), x.shape[1]) if self.is_part else None
        return grouped_linear(hidden, self.down, order, starts, out=answers)


# Where steps are captured, no layer may read what the device computed.
EXPERT_KERNELS: dict[Any, Callable[..., nn.Module]] = {
    QuantizedExperts: GroupedQuantizedExperts,
    Experts: GroupedExperts,
    MoE: FusedMoE,
}
