"""A quantized weight as kernels read it, in one form for all checkpoints.

To add a kind of numbers: a dtype in `kind_of`, a branch of `unpack` in `kernels/quant_matmul.py`, and one of `byte` in
`kernels/unpack_codes.py`. Zero points would be subtracted where the scale is multiplied, times the sum of `x`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from folovllm.electives.quantization import packing

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: torch.finfo(torch.float8_e4m3fn).max}


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """W [outputs, inputs]: numbers times the scale of the block that they lie in.

    Attributes:
        weight: FP8 (E4M3) or int8 [outputs, inputs]; or int32 words of 4-bit numbers [outputs, inputs / 8], in the order of
            `packing.pack_planes`.
        scale: [outputs / rows, inputs / columns], float32; of 4 bits any floats.
        rows, columns: the outputs and inputs of a block. `columns` is a multiple of 16; of 32, and `rows` 1, with 4 bits.
        zeros: of 4 bits, [outputs, inputs / columns]: the code of zero (uint8), or the value of code 0 (floats). Without, the
            code of zero is 8.
    """

    weight: torch.Tensor
    scale: torch.Tensor
    rows: int
    columns: int
    zeros: torch.Tensor | None = None

    @property
    def stored(self) -> torch.Tensor:
        """Return the numbers as integers of their size, since kernels read their bits."""
        return self.weight if self.weight.dtype == torch.int32 else self.weight.view(torch.int8)

    @property
    def codes(self) -> torch.Tensor:
        """Return the codes of 4 bits [outputs, inputs] uint8."""
        return packing.unpack_planes(self.weight, self.columns)

    def scales_and_minimums(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return two tensors [outputs, groups] float32 of 4 bits: W is code * scale + minimum. Both are exact, since codes are small."""
        scales = self.scale.float()
        if self.zeros is None:
            return scales, -8 * scales
        zeros = self.zeros.float()
        return scales, zeros if self.zeros.is_floating_point() else -zeros * scales

    def dequantized(self, dtype: torch.dtype) -> torch.Tensor:
        """Return W in `dtype`, computed in float32 and rounded once. `rows` must be 1."""
        if self.weight.dtype == torch.int32:
            scales, minimums = self.scales_and_minimums()
            codes = self.codes.float().unflatten(1, (-1, self.columns))  # [outputs, groups, columns]
            return codes.mul_(scales[..., None]).add_(minimums[..., None]).flatten(1).to(dtype)
        dense = self.weight.to(dtype)
        if dense.shape[1] % self.columns == 0:
            dense.unflatten(1, (-1, self.columns)).mul_(self.scale[..., None])
        else:  # the last block has fewer inputs
            dense *= self.scale.repeat_interleave(self.columns, 1)[:, : dense.shape[1]]
        return dense


def round_channels(w: torch.Tensor, to: torch.dtype, scale_dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Round `w` [outputs, inputs] with a scale for each output: `to` int8 (127 steps on both sides of 0) or E4M3 (up to 448).

    Returns codes [outputs, inputs] in `to`, and scales [outputs, 1]. A weight is code * scale.
    """
    largest = w.float().abs().amax(dim=1, keepdim=True)
    scale = torch.where(largest > 0, largest / LARGEST[to], 1.0).to(scale_dtype)  # 1 where all are 0
    steps = (w.float() / scale.float()).clamp(-LARGEST[to], LARGEST[to])
    return (steps.round() if to == torch.int8 else steps).to(to), scale


def kind_of(weight: torch.Tensor) -> str:
    """Return how a kernel unpacks these numbers: "int4", "int8", "fp8", or "fp8_bits" on a card that has no such numbers."""
    if weight.dtype in (torch.int8, torch.int32):
        return "int8" if weight.dtype == torch.int8 else "int4"
    return "fp8" if has_fp8(weight.device) else "fp8_bits"


@cache
def has_fp8(device: torch.device) -> bool:
    """Return whether the hardware turns FP8 into other floats (compute capability 8.9 or later). Triton's interpreter does."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 9)
