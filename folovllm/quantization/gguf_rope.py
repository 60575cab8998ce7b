"""What a GGUF file says of scaled angles (RoPE), as the `rope_scaling` of a Hugging Face configuration.

llama.cpp writes linear scaling and YaRN as values. Llama 3's scaling becomes a tensor, `rope_freqs.weight`: by what each frequency is
divided (`generate_extra_tensors` in its `convert_hf_to_gguf.py`). Hugging Face's code computes these factors from four numbers.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from folovllm.layers.rotary_embedding import scale_llama3

LOW, HIGH = 1.0, 4.0  # low_freq_factor and high_freq_factor of all Llama 3 models


def rope_scaling_of(meta: dict[str, Any], factors: torch.Tensor | None, theta: float) -> dict[str, Any]:
    """Return the `rope_scaling`; empty where angles are not scaled.

    Args:
        meta: the file's values.
        factors: its `rope_freqs.weight` [D/2], if there is one.

    Raises:
        ValueError: the scaling is of a kind that is not supported, or lacks a number.
    """
    kind = meta.get("llama.rope.scaling.type", "none")
    said = {} if factors is None else scaling_by(factors, theta)
    if kind == "none":
        return said
    if said or kind not in ("linear", "yarn"):
        raise ValueError(
            f"llama.rope.scaling.type {kind!r}{' with rope_freqs.weight' if said else ''} is not supported"
        )
    said = {"rope_type": kind, "factor": meta["llama.rope.scaling.factor"]}
    if kind == "yarn":
        said["original_max_position_embeddings"] = meta["llama.rope.scaling.original_context_length"]
    return said


def scaling_by(factors: torch.Tensor, theta: float) -> dict[str, Any]:
    """Return the `rope_scaling` that divides frequencies by `factors` [D/2]. Raises ValueError if there is none.

    A factor between 1 and the largest one tells how often its pair turns in the first training's context, and so how long
    that context was. Without such a factor it was as short as the last pair that stays as it is allows.
    """
    largest = float(factors.max())
    if (factors == largest).all():
        return {} if largest == 1 else {"rope_type": "linear", "factor": largest}
    frequencies = theta ** (-torch.arange(len(factors)) / len(factors))
    kept = (1 / factors - 1 / largest) / (1 - 1 / largest)  # 1: as it was; 0: divided by the largest
    contexts = 2 * math.pi * (LOW + kept * (HIGH - LOW)) / frequencies
    between = contexts[(kept > 1e-4) & (kept < 1 - 1e-4)]
    context = round(float(between[0])) if len(between) else math.ceil(float(contexts[kept > 0.5].max()))
    said = {
        "rope_type": "llama3", "factor": largest, "low_freq_factor": LOW, "high_freq_factor": HIGH,
        "original_max_position_embeddings": context,
    }  # fmt: skip
    if not torch.allclose(frequencies / scale_llama3(frequencies, said, context), factors, rtol=1e-3):
        raise ValueError("rope_freqs.weight scales in another way than Llama 3 does, which is not supported")
    return said
