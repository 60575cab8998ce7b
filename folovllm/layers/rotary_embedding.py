"""Rotary position embedding (Su et al. 2021, "RoFormer"), and ways to stretch it to longer contexts."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from folovllm.model_config import UnsupportedModel, rope_kind, rope_parameters

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
    """The angle a position adds to each pair, theta^(-2i/D): [D/2], float32, falling from 1.

    Raises:
        UnsupportedModel: the config asks for a kind of RoPE that is not built in (`SCALINGS` are, and plain).
    """
    parameters, kind = rope_parameters(config), rope_kind(config)
    if kind not in ("default", *SCALINGS):
        known = ", ".join(repr(name) for name in ("default", *SCALINGS))
        raise UnsupportedModel(f"RoPE of type {kind!r} is not supported: only {known} are")
    if (part := parameters.get("partial_rotary_factor", 1.0)) != 1.0:
        raise UnsupportedModel(f"partial rotary embedding (of {part:.0%} of a head) is not supported: only whole heads")
    exponent = torch.arange(0, head_dim, 2, device="cpu").float() / head_dim
    frequencies = 1.0 / (parameters["rope_theta"] ** exponent)
    if kind == "default":
        return frequencies
    return SCALINGS[kind](frequencies, parameters, config.max_position_embeddings)


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


def scale_yarn(frequencies: torch.Tensor, parameters: dict[str, Any], max_position: int) -> torch.Tensor:
    """Slow slow pairs down by `factor`, leave fast ones, blend in between (Peng et al. 2023, "YaRN", section 3.2).

    A pair is fast if it turns more than `beta_fast` times in the context that the model was first trained for, and slow
    if it turns fewer than `beta_slow` times. Llama 3 blends along the number of turns, YaRN along the pair's index.
    """
    num_pairs, context = len(frequencies), parameters.get("original_max_position_embeddings", max_position)

    def pair_that_turns(times: float) -> float:
        return num_pairs * math.log(context / (times * 2 * math.pi)) / math.log(parameters["rope_theta"])

    first = pair_that_turns(parameters.get("beta_fast", 32.0))  # all before it are fast, all behind `last` are slow
    last = pair_that_turns(parameters.get("beta_slow", 1.0))
    if parameters.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * num_pairs - 1)
    slow = ((torch.arange(num_pairs, device="cpu") - first) / ((last - first) or 0.001)).clamp(0.0, 1.0)
    return (1 - slow) * frequencies + slow * frequencies / parameters["factor"]


def scale_linear(frequencies: torch.Tensor, parameters: dict[str, Any], max_position: int) -> torch.Tensor:
    """Slow all down by `factor`, as if tokens stood closer together (Chen et al. 2023, "Position Interpolation")."""
    return frequencies / parameters["factor"]


def scale_dynamic(frequencies: torch.Tensor, parameters: dict[str, Any], max_position: int) -> torch.Tensor:
    """Leave all as they are, which is what "dynamic" does up to `max_position`, where this model ends here.

    Beyond it, each longer context has other angles, and the keys of all earlier tokens would have to be computed anew.
    """
    return frequencies


SCALINGS = {"llama3": scale_llama3, "yarn": scale_yarn, "linear": scale_linear, "dynamic": scale_dynamic}


def rope_amplitude(config: PretrainedConfig) -> float:
    """What cosines and sines are multiplied by: 1, and more under YaRN, which makes the scores of long contexts sharper.

    Queries and keys both grow by it, so scores grow by its square (the paper's temperature, section 3.4).
    """
    parameters = rope_parameters(config)
    if rope_kind(config) != "yarn":
        return 1.0
    if (given := parameters.get("attention_factor")) is not None:
        return float(given)
    stretch = math.log(max(parameters["factor"], 1.0))
    over, under = parameters.get("mscale"), parameters.get("mscale_all_dim")
    return (0.1 * over * stretch + 1) / (0.1 * under * stretch + 1) if over and under else 0.1 * stretch + 1
