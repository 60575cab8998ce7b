"""A KV cache in 8 bits: what its numbers are multiples of, and both ways between them and those that were meant."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

FP8 = torch.float8_e4m3fn
LARGEST = 448.0  # in FP8


@dataclass(frozen=True, slots=True)
class KVScales:
    """One layer's: a cached number times its scale is the number that was meant, for keys less `offset`.

    A query's scores with all keys change by the same number when all keys lose the same vector, and softmax does not see that.
    So only the code that writes keys needs `offset`; no reader does.
    """

    key: float = 1.0
    value: float = 1.0
    offset: torch.Tensor | None = field(default=None, compare=False)  # [Hkv, D] float32

    @property
    def key_factor(self) -> float:
        """What a key is multiplied by before it is cached."""
        return 1 / self.key

    @property
    def value_factor(self) -> float:
        """The same of a value."""
        return 1 / self.value

    def centred(self, key: torch.Tensor) -> torch.Tensor:
        """Return `key` [T, Hkv, D] less the offset in float32, or as it is if there is no offset."""
        return key if self.offset is None else key.float() - self.offset


UNSCALED = KVScales()


def encode(x: torch.Tensor, factor: float) -> torch.Tensor:
    """`x` times `factor` in FP8; what is too large becomes the largest number, as in the kernels (`kernels/fp8_cache.py`)."""
    return (x.float() * factor).clamp(-LARGEST, LARGEST).to(FP8)


def decode(cached: torch.Tensor, scale: float, dtype: torch.dtype) -> torch.Tensor:
    """What `encode` was given, as far as 8 bits hold it."""
    return (cached.float() * scale).to(dtype)
