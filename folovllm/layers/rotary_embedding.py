"""Rotary position embedding (Su et al. 2021, "RoFormer"). What stretches it to longer contexts is in `rope_scaling`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from folovllm.models.model_config import rope_kind, rope_parameters

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class RotaryEmbedding(nn.Module):
    """Rotates each pair of dimensions by an angle proportional to the position, so that q.k depends on distance alone.

    `cos_sin_cache` is [max_position, D] in float32: D/2 cosines, then D/2 sines, all times `amplitude`. A position
    outside it is an error.
    """

    cos_sin_cache: torch.Tensor

    def __init__(self, frequencies: torch.Tensor, max_position: int, amplitude: float = 1.0) -> None:
        super().__init__()
        angles = torch.outer(torch.arange(max_position, device="cpu").float(), frequencies)  # [max_position, D/2]
        cache = torch.cat((angles.cos(), angles.sin()), dim=-1) * amplitude
        self.register_buffer("cos_sin_cache", cache.to(torch.get_default_device()), persistent=False)

    def forward(
        self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotate `query` [T, Hq, D] and `key` [T, Hkv, D] by the angles of `positions` [T]; shapes and dtypes stay."""
        cos, sin = self.cos_sin_cache[positions].unsqueeze(1).chunk(2, dim=-1)  # [T, 1, D/2] each
        return rotate(query, cos, sin), rotate(key, cos, sin)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the pairs (i, i + D/2) of `x` [T, heads, D] counter-clockwise; `cos` and `sin` are [T, 1, D/2], float32.

    The pair (a, b) becomes (a cos - b sin, b cos + a sin). The first half of the result holds all the a's and the second
    all the b's, as Hugging Face's checkpoints have it (the paper pairs neighbours instead). Computed in float32,
    returned in the dtype of `x`.
    """
    first, second = x.float().chunk(2, dim=-1)  # [T, heads, D/2] each
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def rope_frequencies(config: PretrainedConfig, head_dim: int) -> torch.Tensor:
    """The angle a position adds to each pair, theta^(-2i/D): [D/2], float32. Raises UnsupportedModel for an unknown kind of RoPE."""
    parameters = rope_parameters(config)
    exponent = torch.arange(0, head_dim, 2, device="cpu").float() / head_dim
    frequencies = 1.0 / (parameters["rope_theta"] ** exponent)
    if rope_kind(config) == "default" and parameters.get("partial_rotary_factor", 1.0) == 1.0:
        return frequencies
    from folovllm.layers.rope_scaling import scaled

    return scaled(frequencies, config)


def rope_amplitude(config: PretrainedConfig) -> float:
    """What cosines and sines are multiplied by: 1, and more under YaRN."""
    if rope_kind(config) != "yarn":
        return 1.0
    from folovllm.layers.rope_scaling import yarn_amplitude

    return yarn_amplitude(config)
