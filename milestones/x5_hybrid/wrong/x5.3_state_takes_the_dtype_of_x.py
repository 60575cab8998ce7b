"""Returns the state in the dtype of the new inputs; a slot has a dtype of its own."""

import torch
import torch.nn.functional as F


def convolve(x, state, weight):
    inputs = torch.cat((state.to(x.dtype), x), dim=-2)
    windows = inputs.unfold(-2, weight.shape[1], 1)
    mixed = (windows.float() * weight.float()).sum(-1)
    return F.silu(mixed), inputs[..., x.shape[-2] :, :]
