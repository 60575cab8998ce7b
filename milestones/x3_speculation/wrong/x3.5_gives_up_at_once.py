"""Says that nothing matches as soon as the run does not go on."""


class SuffixAutomaton:
    def follow(self, place, token):
        place = self.settle(place)
        if token not in self._next[place.state]:
            return NOWHERE
        return Place(self._next[place.state][token], place.length + 1)
