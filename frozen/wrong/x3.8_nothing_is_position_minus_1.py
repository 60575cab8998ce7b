"""Says that the state before a text's first token is there: an empty place has position -1. Input: a new row, starts 0."""

class KeptStates:
    def before(self, rows, starts):
        wanted = starts - 1
        place = wanted % self.positions.shape[1]
        return self.hidden[rows, place], self.positions[rows, place] == wanted
