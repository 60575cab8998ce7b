"""Finds position -1 in an empty place, which is marked with -1 as well."""


class KeptStates:
    def before(self, rows, starts):
        wanted = starts - 1
        places = wanted % self.hidden.shape[1]
        return self.hidden[rows, places], self.positions[rows, places] == wanted
