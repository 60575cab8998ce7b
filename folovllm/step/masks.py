"""Which tokens some rows of a step may draw: what travels between the forward pass and a draw that waits for it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Int32 = npt.NDArray[np.int32]


@dataclass(slots=True, frozen=True, eq=False)
class Masks:
    """Of n draws; other rows draw as they always do. A row that draws several tokens has a mask for each, in order."""

    rows: Int32  # [n]
    bits: Int32  # [n, ceil(V / 32)]: bit t % 32 of word t // 32 is set where token t may be drawn

    def of_level(self, level: int) -> Masks:
        """Those of each row's first draw (level 0), second draw (1), and so on."""
        place = np.arange(len(self.rows))
        begins = np.concatenate([[True], self.rows[1:] != self.rows[:-1]])[: len(place)]
        at = place - np.maximum.accumulate(np.where(begins, place, 0)) == level
        return Masks(self.rows[at], self.bits[at])
