"""Gives up when nothing is left of the run, though the token alone may be in the text. Input: the text a b c, the run a b of it, then a."""

class SuffixAutomaton:
    def follow(self, place, token):
        place = self.settle(place)
        while token not in self._next[place.state]:
            place = self.shorter(place)
            if place == NOWHERE:
                return NOWHERE
        return self.settle(Place(self._next[place.state][token], place.length + 1))
