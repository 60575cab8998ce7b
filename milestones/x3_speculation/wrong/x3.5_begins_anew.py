"""Begins anew with the token alone where the run does not go on: the rest of the match is thrown away."""


class SuffixAutomaton:
    def follow(self, place, token):
        place = self.settle(place)
        if token not in self._next[place.state]:
            place = NOWHERE
        if token not in self._next[place.state]:
            return NOWHERE
        return Place(self._next[place.state][token], place.length + 1)
