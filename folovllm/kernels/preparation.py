"""What a kernel needs to know to prepare queries and keys itself; without Triton, which not every machine has."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from folovllm.kv_format import UNSCALED, KVScales


@dataclass(slots=True, frozen=True)
class Preparation:
    """What queries and keys go through between their projection and attention."""

    cos_sin_cache: torch.Tensor  # [max_position, D] float32 (`RotaryEmbedding`)
    q_weight: torch.Tensor | None = None  # [D], as `k_weight`: those of the QK-norm, where there is one
    k_weight: torch.Tensor | None = None
    eps: float = 0.0
    scales: KVScales = UNSCALED  # of the cache that K and V go to
