"""Sums in the dtype of the model: in 16 bits the products and the sum lose digits before SiLU sees them."""

import torch
import torch.nn.functional as F


def convolve(x, state, weight):
    inputs = torch.cat((state, x.to(state.dtype)), dim=-2)
    windows = inputs.unfold(-2, weight.shape[1], 1)
    return F.silu((windows * weight).sum(-1)).float(), inputs[..., x.shape[-2] :, :]
