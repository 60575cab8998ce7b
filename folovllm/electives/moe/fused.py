"""A mixture of experts in few kernels: choose and sort, gate and up of all experts, down of all experts, add up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from folovllm.electives.moe.experts import Experts, GroupedExperts
from folovllm.electives.moe.kernels.route import choose, combine
from folovllm.electives.moe.layers import MoE


class FusedMoE(MoE):
    """The choice and the sum by kernels of their own."""

    def choose(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return choose(self.gate(x), self.top_k, self.normalise, self.held)

    def combine(self, answers: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return combine(answers, weights)


# Where steps are captured, no layer may read what the device computed.
EXPERT_KERNELS: dict[Any, Callable[..., nn.Module]] = {Experts: GroupedExperts, MoE: FusedMoE}
