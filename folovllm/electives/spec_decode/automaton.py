"""A suffix automaton: every run of tokens that a text holds, in memory and time that grow linearly with the text."""

from __future__ import annotations

from typing import NamedTuple

MOST = 255  # occurrences are counted so far and no further


class Place(NamedTuple):
    """A run of the text: `length` tokens, one of the runs that `state` stands for."""

    state: int
    length: int


NOWHERE = Place(0, 0)  # the empty run


class SuffixAutomaton:
    """Grows by one token at a time (Blumer et al., "The smallest automaton recognizing the subwords of a text", 1985).

    A state stands for the runs that end at the same places in the text; each is a suffix of the longest of them. There are
    at most two states a token. `_next[s]`: where a token leads from state s. `_link[s]`: the state of the longest suffix of
    its runs that occurs elsewhere, too; -1 for the root, which stands for the empty run.

    Invariant: `_count[s]` is how often the runs of `s` occur, at most `MOST`. A link leads to runs that occur at least as
    often. So `append` counts an occurrence along the links, and stops at the first state that has `MOST`: all behind it have
    it as well. A state is counted at most MOST times, which bounds the work for all tokens together.
    """

    def __init__(self) -> None:
        self._next: list[dict[int, int]] = [{}]
        self._link = [-1]
        self._longest = [0]  # tokens in the longest run of the state
        self._count = [MOST]
        self._last = 0  # the state of the whole text
        self.num_tokens = 0

    def append(self, token: int) -> None:
        """Add `token` to the text."""
        new, state = self._add(self._longest[self._last] + 1, {}, 0), self._last
        while state >= 0 and token not in self._next[state]:
            self._next[state][token] = new
            state = self._link[state]
        self._link[new] = self._exactly(state, token) if state >= 0 else 0
        self._last = new
        self.num_tokens += 1
        while self._count[new] < MOST:
            self._count[new] += 1
            new = self._link[new]

    def _exactly(self, state: int, token: int) -> int:
        """Return the state whose longest run is that of `state` and then `token`. Splits a state that has longer ones as well."""
        found, length = self._next[state][token], self._longest[state] + 1
        if self._longest[found] == length:
            return found
        clone = self._add(length, dict(self._next[found]), self._count[found])
        self._link[clone], self._link[found] = self._link[found], clone
        while state >= 0 and self._next[state].get(token) == found:
            self._next[state][token] = clone
            state = self._link[state]
        return clone

    def _add(self, longest: int, following: dict[int, int], count: int) -> int:
        self._next.append(following)
        self._link.append(0)
        self._longest.append(longest)
        self._count.append(count)
        return len(self._next) - 1

    def longest_repeat(self) -> Place:
        """Return the longest suffix of the text that also occurs earlier in it, without a search."""
        return self.shorter(Place(self._last, self.num_tokens))

    def shorter(self, place: Place) -> Place:
        """Return the longest suffix of a run that also occurs where the run does not."""
        link = self._link[place.state]
        return Place(link, self._longest[link]) if link > 0 else NOWHERE

    def follow(self, place: Place, token: int) -> Place:
        """Return the longest suffix of "the run at `place`, then `token`" that the text holds.

        While no run of the state goes on with `token`, drop tokens at the front: take `shorter`. `NOWHERE` if not even
        `token` alone is in the text. Each step drops at least a token, so following one costs amortised O(1).
        The text may have grown since `place` was found: `settle` it.
        """
        place = self.settle(place)
        while token not in self._next[place.state]:
            if not place.length:
                return NOWHERE
            place = self.shorter(place)
        return Place(self._next[place.state][token], place.length + 1)

    def settle(self, place: Place) -> Place:
        """Return the same run with its state of today: if the state was split, its shorter runs belong to the state of its link."""
        state, length = place
        while state and length <= self._longest[self._link[state]]:
            state = self._link[state]
        return Place(state, length)

    def following(self, place: Place) -> dict[int, int]:
        """Return how often each token followed the run at `place`, at most `MOST`, with the newest continuation last."""
        return {token: self._count[state] for token, state in self._next[self.settle(place).state].items()}
