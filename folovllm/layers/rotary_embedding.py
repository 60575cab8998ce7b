"""Rotary position embedding (Su et al. 2021, "RoFormer"), with Llama 3's stretched frequencies."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from folovllm.layers.unsupported import UnsupportedModel

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class RotaryEmbedding(nn.Module):
    """Rotates each pair of dimensions by an angle proportional to the position, so that q.k depends on distance alone.

    `cos_sin_cache` is [max_position, D] in float32: D/2 cosines, then D/2 sines. A position outside it is an error.
    """

    cos_sin_cache: torch.Tensor

    def __init__(self, frequencies: torch.Tensor, max_position: int) -> None:
        super().__init__()
        angles = torch.outer(torch.arange(max_position, device="cpu").float(), frequencies)  # [max_position, D/2]
        cache = torch.cat((angles.cos(), angles.sin()), dim=-1)
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


def rope_parameters(config: PretrainedConfig) -> dict[str, Any]:
    """`rope_theta`, `rope_type` and what else the type needs, from either place a config may keep them.

    transformers 5 has one dict `rope_parameters`; transformers 4 had `rope_theta` and, beside it, `rope_scaling`.
    """
    modern: dict[str, Any] | None = getattr(config, "rope_parameters", None)
    scaling: dict[str, Any] = getattr(config, "rope_scaling", None) or {}
    return modern or {"rope_theta": getattr(config, "rope_theta", 10000.0), **scaling}


def rope_frequencies(config: PretrainedConfig, head_dim: int) -> torch.Tensor:
    """The angle a position adds to each pair, theta^(-2i/D): [D/2], float32, falling from 1.

    Raises:
        UnsupportedModel: the config asks for a kind of RoPE that is not built in. Plain and "llama3" are.
    """
    parameters = rope_parameters(config)
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind not in ("default", "llama3"):
        raise UnsupportedModel(f"RoPE of type {kind!r} is not supported: only 'default' and 'llama3' are")
    if (part := parameters.get("partial_rotary_factor", 1.0)) != 1.0:
        raise UnsupportedModel(f"partial rotary embedding (of {part:.0%} of a head) is not supported: only whole heads")
    exponent = torch.arange(0, head_dim, 2, device="cpu").float() / head_dim
    frequencies = 1.0 / (parameters["rope_theta"] ** exponent)
    if kind == "default":
        return frequencies
    return scale_llama3(frequencies, parameters, config.max_position_embeddings)


def scale_llama3(frequencies: torch.Tensor, parameters: dict[str, Any], max_position: int) -> torch.Tensor:
    """Slow frequencies down by `factor` where their wave is long, leave the short ones, blend in between.

    A wave is long if it turns fewer than `low_freq_factor` times in the context that the model was first trained for,
    and short if it turns more than `high_freq_factor` times (Llama 3.1's release, `apply_scaling`).
    """
    context = parameters.get("original_max_position_embeddings", max_position)
    low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
    turns = context * frequencies / (2 * math.pi)
    keep = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return keep * frequencies + (1 - keep) * frequencies / parameters["factor"]
