"""Weights in whole numbers of 8 bits, of which zero is zero: a scale for each output, or for groups of its inputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from folovllm.quantization.scaled import Scaled

if TYPE_CHECKING:
    from folovllm.layers.linear import LinearBase

FROM_UNSIGNED = -0x7F7F7F80  # 0x80808080: flips the highest bit of four bytes, which subtracts 128 from each


@dataclass(frozen=True)
class Int8(Scaled):
    """Codes are int8. Activations stay as they are."""

    codes = torch.int8
    code_names = ("I8",)
    spread = 32.0


@dataclass(frozen=True)
class PackedInt8(Int8):
    """The checkpoint has four codes in an int32, the first in its lowest byte, and 128 more than they are."""

    ignores = (*Int8.ignores, "weight_shape")

    def places(self, layer: LinearBase) -> dict[str, Sequence[torch.Tensor]]:
        """As `Int8`, with codes seen in fours."""
        if layer.input_size % 4:
            raise ValueError(f"packed weights of 8 bits need a multiple of 4 inputs, not {layer.input_size}")
        places = super().places(layer)
        return {"weight_packed": [part.view(torch.int32) for part in places.pop("weight")], **places}

    def stored(self, kind: str) -> tuple[str, ...]:
        """As `Int8`."""
        return ("I32",) if kind == "weight_packed" else super().stored(kind)

    def fill(self, kind: str, tensor: torch.Tensor, generator: torch.Generator) -> None:
        """As `Int8`."""
        packed = kind == "weight_packed"
        super().fill("weight" if packed else kind, tensor.view(torch.int8) if packed else tensor, generator)

    def arrange(self, kind: str, tensor: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """As `Int8`, and codes get their sign."""
        return tensor ^ FROM_UNSIGNED if kind == "weight_packed" else super().arrange(kind, tensor, shape)
