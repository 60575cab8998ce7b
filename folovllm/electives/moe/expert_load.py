"""Counts how many tokens are routed to each expert of each layer, on the device; the host reads the counts only on request."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from folovllm.models.model_config import num_experts_of

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from folovllm.engine.llm_engine import LLMEngine


class ExpertLoad:
    """Adds a step's routing to `counts` [L, E] int64. It can be captured, since nothing here waits for the device.

    The choices of all layers are added at the end of a step, by a few kernels in all. Every rank sees all tokens and counts
    all experts, so all ranks have the same counts.
    """

    def __init__(self, config: PretrainedConfig, counters: dict[str, torch.Tensor]) -> None:
        """`counters` get the counts under the name "experts" (`LayerSet.counters`)."""
        self.counts = torch.zeros(config.num_hidden_layers, num_experts_of(config), dtype=torch.int64)
        counters["experts"] = self.counts
        self._chosen: list[torch.Tensor] = []  # by the layers of this step so far, [T, k] each

    def record(self, experts: torch.Tensor) -> None:
        """Record the routing of the next layer, [T, k] numbers of experts among those of all ranks."""
        self._chosen.append(experts)

    def end(self, slots: torch.Tensor) -> None:
        """Add the choices of a step; slots [T] are -1 for padding. Numbers of no expert, which NaN may lead to, are not counted."""
        chosen = torch.stack(self._chosen[-len(self.counts) :])  # [L, T, k], without what a failed step left
        self._chosen.clear()
        counts = (slots >= 0)[:, None] & (chosen >= 0) & (chosen < self.counts.shape[1])
        chosen = chosen.clamp(0, self.counts.shape[1] - 1)
        self.counts.scatter_add_(1, chosen.flatten(1), counts.flatten(1).to(self.counts.dtype))


def expert_load(engine: LLMEngine) -> list[list[int]]:
    """How often each expert of each layer was asked since the start; waits for the steps under way.

    L lists of E numbers; a token asks k experts of a layer. ValueError where that is not counted.
    """
    engine.require_open()
    if not engine.setup.config.extras.get("count_experts"):
        raise ValueError("experts are not counted: set count_experts=True")
    return list(engine.core.executor.collective_rpc(counted, "experts")[0])


def counted(worker: Any, name: str) -> Any:
    """Wait for all steps of a `GPUWorker` so far, and return what its model counted under this name."""
    return worker.runner.model.counters[name].tolist()
