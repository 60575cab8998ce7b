"""Lets everybody in who has a slot, however many tokens the step has by then."""

from engine import Engine


class Wrong(Engine):
    def num_tokens(self, request, budget):
        return len(request.tokens) - request.computed


def make(folder, limits, device):
    return Wrong(folder, limits)
