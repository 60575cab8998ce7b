"""How much worse a model has become: its perplexity on a text, and how often its likeliest token is another one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F


def token_losses(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return the negative log-likelihood (natural logarithm) of each token but a sequence's first: [n, T - 1] float32.

    Their mean is the loss that transformers' models return for `labels=ids`.

    Args:
        logits: [n, T, V]; those after the last token are not used.
        ids: [n, T].
    """
    before = logits[:, :-1].float().flatten(0, 1)  # [n (T - 1), V]
    return F.cross_entropy(before, ids[:, 1:].flatten(), reduction="none").view(len(ids), -1)


def perplexity(losses: torch.Tensor) -> float:
    """Return e to the mean of `losses`: among how many equally likely tokens the model chooses, on average. 1 is the best."""
    return float(losses.mean().exp())


@dataclass(slots=True, frozen=True)
class Quality:
    """A model before and after, on the same text.

    `agreement` is the share of tokens for which both find the same next token likeliest; `tokens` is how many were predicted.
    """

    before: float
    after: float
    agreement: float
    tokens: int


def compare(pieces: Iterable[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]) -> Quality:
    """Compare two models by their logits [n, T, V] for each piece (before, after, ids [n, T]) of a text."""
    found = []  # of each token: both losses, and whether the likeliest is the same
    for before, after, ids in pieces:
        same = (before.argmax(-1) == after.argmax(-1))[:, :-1]
        found.append(torch.stack((token_losses(before, ids), token_losses(after, ids), same.float())).flatten(1))
    losses_before, losses_after, agreement = torch.cat(found, 1)
    return Quality(perplexity(losses_before), perplexity(losses_after), float(agreement.mean()), len(agreement))
