"""Turns the other way. Scores come out right as long as everybody does so, but keys of others do not fit."""

import torch


def rotate(x, cos, sin):
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos + second * sin, second * cos - first * sin), dim=-1).to(x.dtype)
