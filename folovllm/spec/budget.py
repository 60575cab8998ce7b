"""What trying may cost where guesses have not paid."""

from __future__ import annotations

import time
from collections.abc import Callable


class Budget:
    """Seconds that may be lost: a share of the time in which there is work, and what was won before.

    Nobody knows what a try takes before it is over. So who tries pays afterwards, and while something is owed nothing new is
    tried: all tries together lose at most `SHARE` of the time, `most`, and the last try. No more than `most` is ever saved:
    neither a long calm nor a large gain is a reason for a large loss.
    """

    SHARE = 0.005  # of the time

    def __init__(self, most: float, clock: Callable[[], float] = time.perf_counter) -> None:
        """`most`: seconds that are there at the start, and that can be saved up. `clock` gives the seconds that count."""
        self.clock = clock
        self._most = self._left = most
        self._last = clock()

    def left(self) -> float:
        """Seconds that there are to lose; less than nothing if some are owed."""
        now = self.clock()
        self._left, self._last = min(self._left + self.SHARE * (now - self._last), self._most), now
        return self._left

    def pay(self, seconds: float) -> None:
        """Something took so long; less than nothing if it won time."""
        self._left = min(self._left - seconds, self._most)

    def pause(self) -> None:
        """There is nothing to do from now on until `resume`: such time does not count, since nothing can be lost in it."""
        self.left()

    def resume(self) -> None:
        """There is something to do again."""
        self._last = self.clock()
