"""Takes the place as it was found: since then the state may have been split, and the run have moved to another."""


class SuffixAutomaton:
    def follow(self, place, token):
        while token not in self._next[place.state]:
            if not place.length:
                return NOWHERE
            place = self.shorter(place)
        return Place(self._next[place.state][token], place.length + 1)
