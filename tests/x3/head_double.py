"""A draft head that is no elective's: it reads the last hidden state, shares embedding and head, and can be computed by hand."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from folovllm.engine.setup import EngineSetup
from folovllm.layers.attention import Attention
from folovllm.layers.layer_set import LayerSet
from folovllm.models.draft_head import DraftHead
from folovllm.models.llama import LlamaForCausalLM
from folovllm.step.forward_batch import ForwardBatch


class MeanHead(nn.Module):
    """Carries on the mean of (embedding + hidden state) over all pairs so far, plus the newest embedding.

    Its queries are zero, so attention is a mean: each pair whose K/V is missing, doubled or stale shows.
    """

    aux_layers: tuple[int, ...] = ()
    target_ids: torch.Tensor | None = None
    is_in_checkpoint = False

    def __init__(self, setup: EngineSetup, target: LlamaForCausalLM) -> None:
        super().__init__()
        hidden = setup.hf_config.hidden_size
        self.config: Any = SimpleNamespace(num_attention_heads=2, num_key_value_heads=2, head_dim=hidden // 2)
        self.config.hidden_size, self.attn, self._target = hidden, Attention(), [target]

    @staticmethod
    def check(setup: EngineSetup, path: Path) -> None:
        """Any model will do."""

    @classmethod
    def load(cls, setup: EngineSetup, path: Path, target: Any, layers: LayerSet) -> DraftHead:
        return cls(setup, target)

    def combine(self, states: torch.Tensor) -> torch.Tensor:
        return states

    def store(self, hidden: torch.Tensor, batch: ForwardBatch) -> None:
        value = (self._target[0].model.embed(batch.input_ids) + hidden).unflatten(1, (2, -1))
        self.attn.store(torch.zeros_like(value), value, batch)

    def forward(self, hidden: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        self.store(hidden, batch)
        mean = self.attn(hidden.new_zeros(len(hidden), 2, hidden.shape[1] // 2), batch)
        out: torch.Tensor = mean.flatten(1) + self._target[0].model.embed(batch.input_ids)
        return out

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._target[0].lm_head(hidden)


def drafts_by_hand(
    states: torch.Tensor, embedding: torch.Tensor, head: torch.Tensor, tokens: list[int], k: int
) -> tuple[list[int], float]:
    """`MeanHead`'s greedy drafts behind a text whose first n - 1 tokens have `states`, and the smallest top-2 margin."""
    values, margin, found = [embedding[token] + state for token, state in zip(tokens[1:], states, strict=True)], 1e9, []
    newest = tokens[-1]
    for _ in range(k):
        carried = torch.stack(values).mean(0) + embedding[newest]
        best = (head @ carried).topk(2)
        margin, newest = min(margin, float(best.values[0] - best.values[1])), int(best.indices[0])
        found.append(newest)
        values.append(embedding[newest] + carried)
    return found, margin
