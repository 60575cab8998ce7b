"""Gives up the front of the run and counts it all the same: the match seems longer than it is, and is trusted too far."""


class SuffixAutomaton:
    def follow(self, place, token):
        place = self.settle(place)
        length = place.length
        while token not in self._next[place.state]:
            if not place.length:
                return NOWHERE
            place = self.shorter(place)
        return Place(self._next[place.state][token], length + 1)
