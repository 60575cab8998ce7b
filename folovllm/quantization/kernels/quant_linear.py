"""Weights that are codes of 8 bits times scales, and their product with very few rows (`few_codes`).

To add another kind of codes: a branch of `byte` in `unpack_codes.py`, one of `unpack` in `quant_matmul.py`, and a dtype in
`kind_of`. Zero points would be subtracted where the scale is multiplied: by what `x` sums up to.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from folovllm.quantization.kernels.few_codes import few_codes

FEW = (1, 2, 4)  # tokens; above, the tensor cores are better (`quant_matmul`)


@dataclass(frozen=True, slots=True)
class Codes:
    """W [outputs, inputs]: `weight`, of FP8 (E4M3) or int8, times `scale` of the block it lies in.

    `scale` is float32 [outputs / rows, inputs / columns], and `columns` a multiple of 16. Experts may be in 4 bits, too:
    `weight` is then int32, scales are any floats, and `zeros` [outputs, inputs / columns] as `int4_linear` has them.
    """

    weight: torch.Tensor
    scale: torch.Tensor
    rows: int
    columns: int
    zeros: torch.Tensor | None = None


def quant_linear(
    x: torch.Tensor,
    codes: Codes,
    norm_eps: float | None = None,
    gated: bool = False,
    residual: torch.Tensor | None = None,
    columns: torch.Tensor | None = None,
) -> torch.Tensor:
    """`x` [T, inputs], for T in FEW, times the transpose of W; accumulated in float32.

    `norm_eps`, `gated` and `residual` as of `small_linear`, `columns` as of `few_codes`. Inputs are a multiple of 16.
    """
    words, block = codes.weight.view(torch.int32), (codes.rows, codes.columns)
    return few_codes(x, words, codes.scale, None, block, kind_of(codes.weight), norm_eps, gated, residual, columns)


def kind_of(weight: torch.Tensor) -> str:
    """How a kernel unpacks these codes."""
    if weight.dtype in (torch.int8, torch.int32):
        return "int8" if weight.dtype == torch.int8 else "int4"
    return "fp8" if has_fp8(weight.device) else "fp8_bits"


@cache
def has_fp8(device: torch.device) -> bool:
    """Whether the hardware turns FP8 into other floats (compute capability 8.9 or later). Triton's interpreter does."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 9)
