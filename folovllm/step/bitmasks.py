"""Which tokens the samples of a step may be, where something limits them: a bit for each token of the vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from folovllm.step.schedule import Int32

MASKS = "masks"  # the owner of token bitmasks, where they are known before the step starts: index, then the bits


@dataclass(slots=True, frozen=True, eq=False)
class TokenBitmasks:
    """Masks for n sampled tokens. Rows that are not listed sample without a mask. With deferred sampling they follow the forward pass.

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

    def by_index(self, rows_of_step: Sequence[int]) -> Int32:
        """Return them as a step carries them, [n, 1 + ceil(V / 32)]: the index of the scheduled sequence, then the bits."""
        index_of = {row: i for i, row in enumerate(rows_of_step)}
        return np.column_stack([np.array([index_of[row] for row in self.rows.tolist()], np.int32), self.bits])

    @staticmethod
    def from_index(carried: Int32, rows_of_step: Sequence[int]) -> TokenBitmasks:
        """Return what `by_index` made `carried` of."""
        rows = [rows_of_step[i] for i in carried[:, 0].tolist()]
        return TokenBitmasks(np.array(rows, np.int32), np.ascontiguousarray(carried[:, 1:]))
