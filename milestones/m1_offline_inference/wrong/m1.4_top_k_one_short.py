"""Keeps k - 1: drops the k-th largest as well."""

import torch


def apply_top_k_filtering(logits, top_k):
    vocab_size = logits.shape[-1]
    k = torch.where(top_k > 0, top_k, vocab_size).clamp(max=vocab_size)
    kth = logits.sort(-1, descending=True).values.gather(-1, k[:, None] - 1)
    return logits.masked_fill((logits <= kth) & (k < vocab_size)[:, None], -torch.inf)
