"""Token bitmasks of a step: which tokens its rows may sample. With deferred sampling they follow the forward pass."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Int32 = npt.NDArray[np.int32]


@dataclass(slots=True, frozen=True, eq=False)
class TokenBitmasks:
    """Masks for n sampled tokens. Rows that are not listed sample without a mask.

    A row that samples several tokens has a mask for each, in their order.
    """

    rows: Int32  # [n]
    bits: Int32  # [n, ceil(V / 32)]: bit t % 32 of word t // 32 is set where token t may be sampled

    def of_level(self, level: int) -> TokenBitmasks:
        """Return the masks of one level: of each row's first token (level 0), second token (1), and so on."""
        place = np.arange(len(self.rows))
        begins = np.concatenate([[True], self.rows[1:] != self.rows[:-1]])[: len(place)]
        at = place - np.maximum.accumulate(np.where(begins, place, 0)) == level
        return TokenBitmasks(self.rows[at], self.bits[at])
