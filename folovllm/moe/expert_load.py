"""How often each expert of each layer is asked: counted on the device, and read only when it is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from folovllm.model_config import num_experts_of

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class ExpertLoad(nn.Module):
    """Hears from all layers of a model which experts are asked. This one counts nothing."""

    def note(self, experts: torch.Tensor) -> None:
        """The next layer's choices [T, k], by the experts' numbers among all ranks'."""

    def end(self, slots: torch.Tensor) -> None:
        """End a step. slots: [T], -1 for padding of a captured step."""


class CountedLoad(ExpertLoad):
    """Adds a step's choices to `counts` [L, E] int64. A graph can record it: nothing here waits for the device.

    Layers only keep what they chose anyway, and all of it is added at the end: a few kernels a step, not a layer. Every
    rank sees all tokens and counts all experts, so one rank's numbers are everybody's.
    """

    def __init__(self, config: PretrainedConfig, counters: dict[str, torch.Tensor]) -> None:
        """`counters` get the counts under the name "experts" (`LayerSet.counters`)."""
        super().__init__()
        self.counts = torch.zeros(config.num_hidden_layers, num_experts_of(config), dtype=torch.int64)
        counters["experts"] = self.counts
        self._chosen: list[torch.Tensor] = []  # by the layers of this step so far, [T, k] each

    def note(self, experts: torch.Tensor) -> None:
        """As `ExpertLoad`."""
        self._chosen.append(experts)

    def end(self, slots: torch.Tensor) -> None:
        """As `ExpertLoad`. A token that is not a number may have chosen what no expert is called: that counts nowhere."""
        newest = self._chosen[-len(self.counts) :]  # a step that failed may have left some before
        chosen = torch.stack(newest)  # [L, T, k]
        self._chosen.clear()
        counts = (slots >= 0)[:, None] & (chosen >= 0) & (chosen < self.counts.shape[1])
        chosen = chosen.clamp(0, self.counts.shape[1] - 1)
        self.counts.scatter_add_(1, chosen.flatten(1), counts.flatten(1).to(self.counts.dtype))
