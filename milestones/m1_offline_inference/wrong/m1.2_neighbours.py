"""Pairs neighbours (2i, 2i + 1) as the paper does; Hugging Face's checkpoints pair i with i + D/2."""

import torch


def rotate(x, cos, sin):
    first, second = x.float()[..., 0::2], x.float()[..., 1::2]
    turned = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.flatten(-2).to(x.dtype)
