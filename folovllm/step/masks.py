"""Which tokens some rows of a step may draw: what travels between the forward pass and a draw that waits for it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Int32 = npt.NDArray[np.int32]


@dataclass(slots=True, frozen=True, eq=False)
class Masks:
    """Of n rows; other rows draw as they always do."""

    rows: Int32  # [n]
    bits: Int32  # [n, ceil(V / 32)]: bit t % 32 of word t // 32 is set where token t may be drawn
