"""Stage 5: what was computed once is found again, and a long prompt comes in chunks beside the others' next tokens."""

from collections.abc import Iterator

from attention import TiledEngine
from blocks import Blocks
from contract import Limits
from engine import Piece
from serial import Request

PENDING = -1  # stage 6: in the place of a token that is not read yet


class PrefixBlocks(Blocks):
    """Full blocks have names. A name stays when the block is freed, until the block is taken for something else.

    A name is the name of the block before and the block's own tokens. So equal names mean equal prefixes.
    """

    def __init__(self, limits: Limits) -> None:
        super().__init__(limits)
        self.holders = [0] * limits.num_blocks
        self.block_of, self.name_of = dict[int, int](), dict[int, int]()

    def names(self, tokens: list[int]) -> Iterator[int]:
        """The names of the full blocks of `tokens`."""
        name, size = 0, self.limits.block_size
        for end in range(size, len(tokens) + 1, size):
            name = hash((name, *tokens[end - size : end]))
            yield name

    def match(self, request: Request) -> int:
        """Begin its table with the blocks that are there. Return how many tokens these hold; one is left to compute."""
        table = self.tables[request.id] = []
        for name in self.names(request.tokens[:-1]):
            if (block := self.block_of.get(name)) is None:
                break
            if not self.holders[block]:
                self.free.remove(block)
            self.holders[block] += 1
            table.append(block)
        return len(table) * self.limits.block_size

    def publish(self, request: Request, end: int) -> None:
        """Name the full blocks of its first `end` tokens, all of which are computed. A name belongs to one block."""
        tokens = request.tokens[:end]
        known = tokens[: tokens.index(PENDING)] if PENDING in tokens else tokens
        for block, name in zip(self.tables[request.id], self.names(known), strict=False):
            if name not in self.block_of and block not in self.name_of:
                self.block_of[name], self.name_of[block] = block, name

    def take(self) -> int:
        block = self.free.pop(0)  # the one that was free for the longest time
        if block in self.name_of:
            del self.block_of[self.name_of.pop(block)]
        self.holders[block] = 1
        return block

    def release(self, request: Request) -> None:
        for block in reversed(
            self.tables.pop(request.id, [])
        ):  # so that the end of a prefix is taken before its beginning
            self.holders[block] -= 1
            if not self.holders[block]:
                self.free.append(block)


class ChunkedEngine(TiledEngine):
    """Begins with the blocks that it finds, and gives a step no more tokens than its budget."""

    memory_type = PrefixBlocks
    memory: PrefixBlocks

    def num_tokens(self, request: Request, budget: int) -> int:
        return min(len(request.tokens) - request.computed, budget)

    def admit(self, request: Request, budget: int) -> int:
        if not budget:
            return 0
        request.computed = self.memory.match(request)
        if n := super().admit(request, budget):
            return n
        self.memory.release(request)
        request.computed = 0
        return 0

    def advance(self, piece: Piece, token: int | None) -> None:
        request = next(request for request in self.running if request.id == piece.id)
        self.memory.publish(request, piece.start + len(piece.ids))
        super().advance(piece, token)
