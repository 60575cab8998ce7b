"""Weights in FP8 (E4M3): per tensor, per output, or in blocks of 128 x 128 as Qwen's and DeepSeek's checkpoints have them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from folovllm.layers.formats.scaled import Scaled


@dataclass(frozen=True)
class Fp8(Scaled):
    """Codes are E4M3, half the bytes of 16 bits; activations stay as they are, also where a checkpoint has scales for them.

    Products of FP8 with FP8, which a GPU of compute capability 8.9 or later takes at twice the rate, would be a `product` of
    this class for many tokens: `x` divided by a scale for each token, `torch._scaled_mm`, and sums of 128 products added
    up outside the tensor cores, which keep too few bits for long ones.
    """

    codes = torch.float8_e4m3fn
    code_names = ("F8_E4M3",)
    spread = 64.0
