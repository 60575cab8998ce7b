"""The parameters with which a kernel prepares queries and keys itself. This file does not import Triton."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from folovllm.step.kv_format import UNSCALED, KVScales


@dataclass(slots=True, frozen=True)
class Preparation:
    """The steps between the projection of queries and keys and attention: QK-norm, RoPE, and the scales of the cache."""

    cos_sin_cache: torch.Tensor  # [max_position, D] float32 (`RotaryEmbedding`)
    q_weight: torch.Tensor | None = None  # [D]; with `k_weight` the weights of the QK-norm, if there is one
    k_weight: torch.Tensor | None = None
    eps: float = 0.0
    scales: KVScales = UNSCALED  # of the KV cache
