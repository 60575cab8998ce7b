"""The heads share the largest score: where another one is larger by 200, all weights of a head are 0."""

import torch

from folovllm.electives.rollouts.attention import CONTEXT


def attend_in_tiles(query, key, value, positions, scale):
    largest = torch.full(query.shape[:-1], -torch.inf, device=query.device)  # [n, Hkv, R]
    total = torch.zeros_like(largest)
    result = torch.zeros(query.shape, device=query.device)
    for start in range(0, key.shape[2], CONTEXT):
        tile = slice(start, start + CONTEXT)
        seen = torch.arange(start, start + CONTEXT, device=query.device) <= positions[:, None, :, None]
        scores = (query @ key[:, :, tile].transpose(-1, -2)).float() * scale  # [n, Hkv, R, CONTEXT]
        scores = scores.masked_fill(~seen, -torch.inf)
        before, largest = largest, torch.maximum(largest, scores.amax((1, 3), keepdim=True)[..., 0])
        weights, decay = (scores - largest[..., None]).exp(), (before - largest).exp()
        total = total * decay + weights.sum(-1)
        result = result * decay[..., None] + (weights.to(value.dtype) @ value[:, :, tile]).float()
    return (result / total[..., None]).to(value.dtype)
