"""Rotates in the dtype of the input: in bfloat16 cosines lose all but two digits."""

import torch


def rotate(x, cos, sin):
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
