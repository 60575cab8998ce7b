"""Who guesses for answers with a form although it does not know the form: as often as it has been of use."""

from __future__ import annotations

from dataclasses import dataclass

LONGEST = 64


@dataclass(slots=True)
class Pause:
    """Calls to sit out: twice as many after each useless guess, none after a useful one."""

    length: int = 0
    left: int = 0

    def note(self, was_useful: bool) -> None:
        """A guess was judged."""
        self.length = 0 if was_useful else min(max(1, 2 * self.length), LONGEST)
        self.left = self.length


class Patience:
    """Says for which rows with a form a guess is worth a try.

    A form rules out what the model would write by itself, so all that a small model guesses may be cut away, at each step
    again. Each row has a pause of its own once a guess for it was judged; all others share one, so that short answers do not
    each try anew what failed for those before them.
    """

    def __init__(self) -> None:
        self._common, self._own = Pause(), dict[int, Pause]()  # by seq_id

    def may_try(self, seq_id: int) -> bool:
        """Whether to guess for this row now; if not, that is a call of its pause."""
        pause = self._own.get(seq_id, self._common)
        is_over = pause.left == 0
        pause.left -= not is_over
        return is_over

    def note(self, seq_id: int, was_useful: bool) -> None:
        """The last guess for a row was judged."""
        if seq_id not in self._own:
            self._own[seq_id] = Pause(self._common.length)
        self._own[seq_id].note(was_useful)
        self._common.note(was_useful)

    def finish(self, seq_id: int) -> None:
        """A row has ended."""
        self._own.pop(seq_id, None)
