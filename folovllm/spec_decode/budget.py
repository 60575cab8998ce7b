"""What trying may cost where guesses have not paid."""

from __future__ import annotations

from collections.abc import Callable


class Budget:
    """Seconds that may be lost: a share of the time in which there is work, and what was won before.

    Nobody knows what a try takes before it is over. So who tries pays afterwards, and while something is owed nothing new is
    tried: all that is paid loses at most `SHARE` of the time, the opening loan, and the last try. No more than `most` is ever
    saved: neither a long calm nor a large gain is a reason for a large loss. So texts that stop to pay lose `most` behind that.
    """

    SHARE = 0.005  # of the time

    def __init__(self, most: float, clock: Callable[[], float], loan: float | None = None) -> None:
        """`most`: seconds that can be saved up. `clock` gives the seconds that count.

        `loan`: seconds that are there at the start, once, and may be more; `most` if None.
        """
        self.clock = clock
        self._most, self._left = most, most if loan is None else loan
        self._last = clock()

    def left(self) -> float:
        """Seconds that there are to lose; less than nothing if some are owed."""
        now = self.clock()
        self.pay(-self.SHARE * (now - self._last))
        self._last = now
        return self._left

    def pay(self, seconds: float) -> None:
        """Something took so long; less than nothing if it won time."""
        self._left = min(self._left - seconds, max(self._left, self._most))

    def pause(self) -> None:
        """There is nothing to do from now on until `resume`: such time does not count, since nothing can be lost in it."""
        self.left()

    def resume(self) -> None:
        """There is something to do again."""
        self._last = self.clock()
