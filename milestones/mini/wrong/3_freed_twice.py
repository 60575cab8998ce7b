"""Gives the blocks back and keeps the table: when the sequence ends after a preemption, its old blocks are free twice."""

from blocks import Blocks, PagedEngine


class Kept(Blocks):
    def release(self, request):
        self.free += self.tables.pop(request.id, [])
        if not request.is_done:
            request.old = getattr(request, "old", []) + self.free[-1:]
        else:
            self.free += getattr(request, "old", [])


class Wrong(PagedEngine):
    memory_type = Kept


def make(folder, limits, device):
    return Wrong(folder, limits)
