"""Mixture of experts: many MLPs in the place of one, of which each token asks a few (Shazeer et al. 2017).

A router gives each token k of E experts. Pairs (token, expert) are sorted by expert, so that each expert multiplies all its
tokens at once; then each token adds up the outputs of its experts. Nothing here waits for a number that the device computes,
but for the torch path of `Experts`, which only runs where steps are not captured.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from folovllm.electives.moe.experts import Experts, expert_linear_methods
from folovllm.layers.activation import SiluAndMul
from folovllm.layers.fusable import RankSum
from folovllm.layers.layer_set import LayerSet
from folovllm.layers.linear import LinearBase, MergedColumnParallelLinear, RowParallelLinear
from folovllm.models.model_config import UnsupportedModel, num_experts_of

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from folovllm.electives.moe.expert_load import ExpertLoad


def route(logits: torch.Tensor, top_k: int, normalise: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The experts that each token asks, and how much each of them counts.

    Args:
        logits: [T, E], how well each expert suits each token.
        normalise: whether the weights of a token's k experts are divided by their sum.

    Returns:
        Weights [T, k] in the dtype of `logits`, which are softmax's (over all E, in float32), the largest first, and of
        equal ones that of the lowest expert (`topk` promises no order); and the experts' numbers [T, k], int64.
    """
    weights, experts = logits.softmax(-1, dtype=torch.float32).sort(dim=-1, descending=True, stable=True)
    weights, experts = weights[:, :top_k], experts[:, :top_k]
    if normalise:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights.to(logits.dtype), experts


def sort_by_expert(experts: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Bring pairs (token, expert) into the order of experts; pairs of one expert keep their order.

    Args:
        experts: [T, k]. Pair p = t * k + j is token t's j-th choice. A number outside 0 to `num_experts` - 1 is an expert
            of another rank; its pairs come last.

    Returns:
        `order` [T * k]: the pairs, expert by expert; and `starts` [num_experts + 1], int64: the pairs of expert e are
        order[starts[e]:starts[e + 1]]. Both stay on the device.
    """
    flat = experts.flatten()
    flat = torch.where((flat >= 0) & (flat < num_experts), flat, num_experts)
    sorted_experts, order = flat.sort(stable=True)
    return order, torch.searchsorted(sorted_experts, torch.arange(num_experts + 1, device=flat.device))


def combine(answers: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Add up what each token's experts said, by how much each of them counts.

    Args:
        answers: [T, k, H]. weights: [T, k], as the router gave them; they need not sum to 1.

    Returns:
        [T, H] in the dtype of `answers`; the sum is computed in float32 and rounded once.
    """
    return torch.einsum("tkh,tk->th", answers.float(), weights.float()).to(answers.dtype)


class SharedExpert(nn.Module):
    """An MLP that every token asks, beside the k of its own choice; a gate says how much it counts (Qwen2-MoE)."""

    def __init__(self, config: PretrainedConfig, layers: LayerSet) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.shared_expert_intermediate_size
        gate_up, down = (layers.linear_method_of(f"mlp.shared_expert.{name}") for name in ("gate_up_proj", "down_proj"))
        self.gate_up_proj = layers.make(MergedColumnParallelLinear, hidden, [inner] * 2, False, gate_up)
        # Summed over ranks with the others' answers (`MoE.sum`).
        self.down_proj = RowParallelLinear(inner, hidden, linear_method=down)
        self.act_fn = layers.make(SiluAndMul)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, H] -> [T, H]."""
        return self.down_proj(self.act_fn(self.gate_up_proj(x)))


def experts_of_rank(config: PretrainedConfig, ranks: RankSum) -> range:
    """The experts that this rank holds: a part of every one, or, in expert parallelism, an equal share of them whole.

    All tokens are on all ranks anyway, so no token travels to its experts and back: one sum joins both kinds.
    """
    num_experts = num_experts_of(config)
    if not getattr(config, "expert_parallel", False):
        return range(num_experts)
    count = num_experts // ranks.size
    return range(ranks.rank * count, (ranks.rank + 1) * count)


def expert_size_of(config: PretrainedConfig) -> int:
    """Return I, the intermediate size of one expert. Qwen's configs keep it beside a dense MLP's, Mixtral's in its place."""
    return int(getattr(config, "moe_intermediate_size", None) or config.intermediate_size)


class MoE(nn.Module):
    """Stands in the place of a decoder layer's MLP."""

    load: ExpertLoad | None = None  # counts how often each expert is asked

    def __init__(self, config: PretrainedConfig, layers: LayerSet) -> None:
        super().__init__()
        if config.hidden_act != "silu":
            raise UnsupportedModel(f"hidden_act {config.hidden_act!r} is not supported: only 'silu' is")
        hidden, num_experts = config.hidden_size, num_experts_of(config)
        self.top_k, self.normalise = config.num_experts_per_tok, getattr(config, "norm_topk_prob", True)
        self.sum = layers.make(RankSum)
        self.held = experts_of_rank(config, self.sum)
        # Whole on every rank.
        self.gate = LinearBase(hidden, [num_experts], linear_method=layers.linear_method_of("mlp.gate"))
        methods = expert_linear_methods(layers, num_experts)
        self.experts = layers.make(Experts, self.held, num_experts, hidden, expert_size_of(config), methods)
        self.shared_expert = self.shared_expert_gate = None
        if getattr(config, "shared_expert_intermediate_size", None):
            self.shared_expert = SharedExpert(config, layers)
            method = layers.linear_method_of("mlp.shared_expert_gate")
            self.shared_expert_gate = LinearBase(hidden, [1], linear_method=method)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, H] -> [T, H]."""
        weights, experts, order, starts = self.choose(x)
        if self.load is not None:
            self.load.record(experts)
        result = self.combine(self.experts(x, order, starts).view(len(x), self.top_k, x.shape[1]), weights)
        if self.shared_expert is not None and self.shared_expert_gate is not None:
            result = result + self.shared_expert_gate(x).sigmoid() * self.shared_expert(x)
        return self.sum(result)

    def choose(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """[T, H] -> weights and numbers of each token's experts, two [T, k], and the pairs' `order` and `starts` (`sort_by_expert`)."""
        weights, experts = route(self.gate(x), self.top_k, self.normalise)
        return weights, experts, *sort_by_expert(experts - self.held.start, len(self.held))

    def combine(self, answers: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Answers [T, k, H] and weights [T, k] -> [T, H]."""
        return combine(answers, weights)
