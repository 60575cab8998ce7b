"""Token bitmasks of a step: which tokens its samples may be. With deferred sampling they follow the forward pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from folovllm.sampling_row import Int32


@dataclass(slots=True, frozen=True, eq=False)
class TokenBitmasks:
    """Masks for n sampled tokens. Rows that are not listed sample without a mask.

    A row that samples several tokens has a mask for each, in their order.
    """

    rows: Int32  # [n]
    bits: Int32  # [n, ceil(V / 32)]: bit t % 32 of number t // 32 is set where token t may be sampled

    def places(self, rows: npt.ArrayLike) -> npt.NDArray[np.signedinteger[Any]]:
        """Return the samples that have these masks, [n], in a step whose samples have these `rows` [R]."""
        return np.isin(rows, self.rows).nonzero()[0]

    def of_samples(self, rows: Int32) -> Int32:
        """Return a mask for each sample [R, ceil(V / 32)] of such a step. Samples without a mask allow all tokens."""
        bits = np.full((len(rows), self.bits.shape[1]), -1, np.int32)
        bits[self.places(rows)] = self.bits
        return bits
