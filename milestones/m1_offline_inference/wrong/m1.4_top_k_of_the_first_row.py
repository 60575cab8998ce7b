"""Takes the first row's k for all rows."""

import torch


def apply_top_k_filtering(logits, top_k):
    vocab_size = logits.shape[-1]
    k = int(top_k[0]) if int(top_k[0]) > 0 else vocab_size
    kth = logits.topk(min(k, vocab_size), dim=-1).values[:, -1:]
    return logits.masked_fill(logits < kth, -torch.inf)
