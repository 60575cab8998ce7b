"""Train the embedded mixture of experts on the same stories. `python -m tools.train_tiny.experts OUT`, or with `--smoke`."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

from .train import TINY, Run, arguments_of, cross_entropy, model_config, smoke, train

NUM_EXPERTS, ASKED = 8, 2
BALANCE = 0.01  # weight of the loss that keeps any expert from being asked always, or never
SIZES = {"num_hidden_layers": 5, "moe_intermediate_size": 112, "num_experts": NUM_EXPERTS, "num_experts_per_tok": ASKED}


def experts_config(**overrides: int) -> Qwen3MoeConfig:
    """The dense model's shape, a layer less, and 8 small MLPs in the place of each: 5.5M parameters, 2.9M for a token."""
    fields = model_config(**{name: overrides.pop(name) for name in TINY if name in overrides}).to_dict()
    for name in ("model_type", "architectures", "layer_types", "transformers_version"):
        fields.pop(name, None)
    return Qwen3MoeConfig(**fields | SIZES | {"norm_topk_prob": True} | overrides)


def balance_of(logits: Tensor) -> Tensor:
    """How unevenly the experts of a layer are asked: 1 if all alike (Fedus et al. 2021, "Switch Transformers", 2.2).

    logits: [tokens, experts]. Shares of tokens have no slope, so the router learns through its probabilities.
    """
    probabilities = logits.float().softmax(-1)
    asked = torch.zeros_like(probabilities).scatter_(1, probabilities.topk(ASKED).indices, 1.0 / ASKED)
    return logits.shape[-1] * (asked.mean(0) * probabilities.mean(0)).sum()


def loss_of(model: PreTrainedModel, ids: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy, and, while training, the balance of each layer. ids, labels: [rows, ROW]"""
    with torch.autocast(ids.device.type, torch.bfloat16):
        out = model.model(input_ids=ids, use_cache=False, output_router_logits=True)
        loss = cross_entropy(model, out.last_hidden_state, labels)
    if torch.is_grad_enabled():
        loss = loss + BALANCE * torch.stack([balance_of(logits) for logits in out.router_logits]).mean()
    return loss


def main() -> None:
    arguments = arguments_of(__doc__)
    if arguments.smoke:
        tiny = experts_config(**TINY | {"num_hidden_layers": 2, "moe_intermediate_size": 32})
        smoke(arguments.out, lambda: Qwen3MoeForCausalLM(tiny), loss_of)
    else:
        run = Run(arguments.out, seed=arguments.seed, steps=arguments.steps, compile=False)
        train(run, lambda: Qwen3MoeForCausalLM(experts_config()), loss_of)


if __name__ == "__main__":
    main()
