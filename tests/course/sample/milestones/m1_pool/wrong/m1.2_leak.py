"""Gives nothing back."""


class Pool:
    def give(self, thing):
        pass
