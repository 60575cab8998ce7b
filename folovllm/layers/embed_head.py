"""Token ids to vectors, and vectors to logits."""

from __future__ import annotations

import torch
from torch import nn


class VocabParallelEmbedding(nn.Module):
    """One row of `weight` [V, H] per token id. Named for the dimension along which several GPUs will share it."""

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """[T] int64 -> [T, H]."""
        return self.weight[input_ids]


class ParallelLMHead(VocabParallelEmbedding):
    """Reads the same matrix the other way: how well a hidden state agrees with each token's row."""

    def forward(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """[S, H] -> logits [S, V], in the dtype of the model; written to `out` if that is given."""
        return torch.mm(hidden, self.weight.t(), out=out)
