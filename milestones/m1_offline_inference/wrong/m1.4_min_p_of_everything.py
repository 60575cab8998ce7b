"""Compares probabilities with min_p itself instead of with min_p times the largest one."""

import torch


def apply_min_p_filtering(logits, min_p):
    return logits.masked_fill(logits.softmax(-1) < min_p[:, None], -torch.inf)
