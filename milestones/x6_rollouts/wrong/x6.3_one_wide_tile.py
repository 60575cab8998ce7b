"""Takes the whole context as one tile: its width depends on the longest sequence of the batch, and so does the order of the sums."""

import torch


def attend_in_tiles(query, key, value, positions, scale):
    seen = torch.arange(key.shape[2], device=query.device) <= positions[:, None, :, None]
    scores = (query @ key.transpose(-1, -2)).float() * scale
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    return (weights.to(value.dtype) @ value).to(value.dtype)
