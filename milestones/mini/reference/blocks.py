"""Stage 3: short blocks. A table says where a sequence's tokens lie, and who came last gives way when memory is full."""

import torch
from engine import Engine, Piece, Slots
from model import causal_attention
from serial import Request
from torch import Tensor


class Blocks(Slots):
    """Which blocks a sequence has: as many as its tokens need, taken when it needs them."""

    def allocate(self, request: Request, end: int) -> bool:
        table = self.tables.get(request.id, [])
        missing = -(-end // self.limits.block_size) - len(table)
        if missing > len(self.free):
            return False
        self.tables[request.id] = table + [self.take() for _ in range(missing)]
        return True

    def take(self) -> int:
        """A block for new contents."""
        return self.free.pop(0)


class PagedEngine(Engine):
    """Knows its K/V by block tables, and preempts."""

    memory_type = Blocks

    def make_room(self, request: Request, end: int) -> bool:
        """Whether it has room now. Until it has, the last to arrive gives way, in the end the sequence itself."""
        while not self.memory.allocate(request, end):
            victim = self.running[-1]
            self.preempt(victim)
            if victim is request:
                return False
        return True

    def preempt(self, victim: Request) -> None:
        """Take its blocks. It waits in front, with its tokens, and computes them all again."""
        self.running.remove(victim)
        self.waiting.appendleft(victim)
        self.memory.release(victim)
        self.preempted.append(victim.id)
        victim.computed = 0

    def store(self, layer: int, piece: Piece, kv: Tensor) -> None:
        positions, size = torch.arange(piece.start, piece.start + kv.shape[1]), self.limits.block_size
        block = torch.tensor(piece.table)[positions // size]
        self.cache[layer, :, block, positions % size] = kv  # the one line that translates positions

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, table: list[int], start: int) -> Tensor:
        end = start + len(query)
        key, value = (cache[table].flatten(0, 1)[:end] for cache in (keys, values))  # a copy, in order
        return causal_attention(query, key, value, start)
