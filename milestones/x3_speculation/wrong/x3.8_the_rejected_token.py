"""Looks for the state of the step's first token itself: that one was rejected, and a new token stands in its place."""


class KeptStates:
    def before(self, rows, starts):
        wanted = starts
        places = wanted % self.hidden.shape[1]
        return self.hidden[rows, places], (wanted >= 0) & (self.positions[rows, places] == wanted)
