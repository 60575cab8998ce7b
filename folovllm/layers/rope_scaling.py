"""Ways to stretch RoPE to longer contexts; imported when a model's config asks for one."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from folovllm.models.model_config import UnsupportedModel, rope_kind, rope_parameters

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def scaled(frequencies: torch.Tensor, config: PretrainedConfig) -> torch.Tensor:
    """The frequencies [D/2] as the config scales them. Raises UnsupportedModel if it does so in a way that is not built in."""
    parameters, kind = rope_parameters(config), rope_kind(config)
    if kind not in ("default", *SCALINGS):
        known = ", ".join(repr(name) for name in ("default", *SCALINGS))
        raise UnsupportedModel(f"RoPE of type {kind!r} is not supported: only {known} are")
    if (part := parameters.get("partial_rotary_factor", 1.0)) != 1.0:
        raise UnsupportedModel(f"partial rotary embedding (of {part:.0%} of a head) is not supported: only whole heads")
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


def yarn_amplitude(config: PretrainedConfig) -> float:
    """YaRN's factor on cosines and sines, which makes the scores of long contexts sharper.

    Queries and keys both grow by it, so scores grow by its square (the paper's temperature, section 3.4).
    """
    parameters = rope_parameters(config)
    if (given := parameters.get("attention_factor")) is not None:
        return float(given)
    stretch = math.log(max(parameters["factor"], 1.0))
    over, under = parameters.get("mscale"), parameters.get("mscale_all_dim")
    return (0.1 * over * stretch + 1) / (0.1 * under * stretch + 1) if over and under else 0.1 * stretch + 1
