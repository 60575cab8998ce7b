"""Preempts who came first. The oldest requests lose most, and may never end."""

from blocks import PagedEngine


class Wrong(PagedEngine):
    def make_room(self, request, end):
        while not self.memory.allocate(request, end):
            victim = self.running[0]
            self.preempt(victim)
            if victim is request:
                return False
        return True


def make(folder, limits, device):
    return Wrong(folder, limits)
