"""A pool of numbered things: exercises of two milestones in one file."""

from collections import deque


class Empty(ValueError):
    """Nothing left."""


class Pool:
    """Hands out 0 .. size - 1."""

    def __init__(self, size: int) -> None:
        self.free = deque(range(size))

    def take(self) -> int:
        """The next free thing. `Empty` when there is none."""
        # first in, first out
        if not self.free:
            raise Empty("nothing left")
        return self.free.popleft()

    def give(self, thing: int) -> None:
        """Return a thing."""
        self.free.append(thing)

    def share(self, parts: int) -> list[list[int]]:
        """Split what is free into that many parts, sizes differing by one at most."""
        things = list(self.free)
        return [things[n::parts] for n in range(parts)]
