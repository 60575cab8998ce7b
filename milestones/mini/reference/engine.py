"""Stage 2: continuous batching. Each step decides anew who takes part, and one pass over the weights serves all of them."""

from collections import deque
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from contract import Limits, Step
from model import Model, causal_attention
from serial import Request
from torch import Tensor


class Slots:
    """Which slot of the cache a sequence has. A slot is a block as long as the longest text."""

    def __init__(self, limits: Limits) -> None:
        self.limits, self.free, self.tables = limits, list(range(limits.num_blocks)), dict[str, list[int]]()

    def allocate(self, request: Request, end: int) -> bool:
        """Make the table of `request` cover its first `end` tokens. False, and nothing changed, where there is no room."""
        if request.id not in self.tables:
            if not self.free:
                return False
            self.tables[request.id] = [self.free.pop(0)]
        return True

    def release(self, request: Request) -> None:
        """Take all blocks back."""
        self.free += self.tables.pop(request.id, [])


class Piece(NamedTuple):
    """One sequence's part of a step: values, so that a device may look at them later."""

    id: str
    start: int
    ids: list[int]  # the tokens to compute
    table: list[int]
    is_last: bool  # whether its newest token is among them, so that the step samples the next


class Engine:
    """The scheduler, and the model over a flat batch. Who came first is served first."""

    memory_type: type[Slots] = Slots

    def __init__(self, folder: Path, limits: Limits) -> None:
        self.model, self.limits, self.memory = Model(folder), limits, self.memory_type(limits)
        self.waiting, self.running, self.preempted = deque[Request](), list[Request](), list[str]()
        config = self.model.config
        shape = limits.num_blocks, limits.block_size, config["num_key_value_heads"], config["head_dim"]
        self.cache = torch.zeros(config["num_hidden_layers"], 2, *shape)  # [L, 2, N, B, Hkv, D]

    def add(self, id: str, prompt: list[int], max_tokens: int) -> None:
        self.waiting.append(Request(id, list(prompt), len(prompt) + max_tokens))

    def step(self) -> Step:
        batch, tables = self.schedule()
        tokens = self.run(batch)
        for piece in batch:
            self.advance(piece, tokens.get(piece.id))
        return Step([(piece.id, piece.start, len(piece.ids)) for piece in batch], tables, tokens, self.preempted)

    # -- who takes part ----------------------------------------------------------------------------------------------

    def schedule(self) -> tuple[list[Piece], dict[str, list[int]]]:
        """Return the pieces of the next step, and who holds which blocks: those that run first, then newcomers."""
        batch, self.preempted, budget = list[Piece](), [], self.limits.max_tokens
        for request in list(self.running):
            n = self.num_tokens(request, budget)
            if n and request in self.running and self.make_room(request, request.computed + n):
                batch.append(self.piece(request, n))
                budget -= n
        while self.waiting and len(self.running) < self.limits.max_seqs and not self.preempted:
            n = self.admit(self.waiting[0], budget)
            if not n:
                break
            self.running.append(self.waiting.popleft())
            batch.append(self.piece(self.running[-1], n))
            budget -= n
        return batch, {id: list(table) for id, table in self.memory.tables.items()}

    def num_tokens(self, request: Request, budget: int) -> int:
        """How many tokens of it this step computes: all that are left, or none."""
        n = len(request.tokens) - request.computed
        return n if n <= budget else 0

    def make_room(self, request: Request, end: int) -> bool:
        """Whether a running sequence has room for `end` tokens. It always has: its slot is as long as any text."""
        return self.memory.allocate(request, end)

    def admit(self, request: Request, budget: int) -> int:
        """Give a newcomer its room. Return how many tokens of it this step computes, 0 where it has to wait."""
        n = self.num_tokens(request, budget)
        return n if n and self.memory.allocate(request, request.computed + n) else 0

    def piece(self, request: Request, n: int) -> Piece:
        end, table = request.computed + n, list(self.memory.tables[request.id])
        return Piece(request.id, request.computed, request.tokens[end - n : end], table, end == len(request.tokens))

    def advance(self, piece: Piece, token: int | None) -> None:
        """Note what a step has computed. A sequence that is done gives its blocks back at once."""
        request = next(request for request in self.running if request.id == piece.id)
        request.computed += len(piece.ids)
        if token is not None:
            request.tokens.append(token)
        if request.is_done:
            self.running.remove(request)
            self.memory.release(request)

    # -- what it computes --------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def run(self, batch: list[Piece]) -> dict[str, int]:
        """Compute all pieces as one flat batch. Return the next token of each sequence whose newest token was in it."""
        if not batch:
            return {}
        ids = torch.tensor([id for piece in batch for id in piece.ids])  # [T]
        positions = torch.cat([torch.arange(p.start, p.start + len(p.ids)) for p in batch])
        hidden = self.model(ids, positions, partial(self.attention, batch))
        last = torch.tensor([len(piece.ids) for piece in batch]).cumsum(0) - 1  # [S]
        tokens = self.model.logits(hidden[last]).argmax(-1).tolist()
        return {piece.id: token for piece, token in zip(batch, tokens, strict=True) if piece.is_last}

    def attention(self, batch: list[Piece], layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """An `Attention`: store the K/V of all pieces, then let each sequence look at its own cache and no other."""
        sizes = [len(piece.ids) for piece in batch]
        for piece, k, v in zip(batch, key.split(sizes), value.split(sizes), strict=True):
            self.store(layer, piece, torch.stack((k, v)))
        keys, values = self.cache[layer]
        pieces = zip(batch, query.split(sizes), strict=True)
        return torch.cat([self.attend(q, keys, values, piece.table, piece.start) for piece, q in pieces])

    def store(self, layer: int, piece: Piece, kv: Tensor) -> None:
        """Put new K/V [2, n, Hkv, D] into the sequence's slot."""
        self.cache[layer, :, piece.table[0], piece.start : piece.start + kv.shape[1]] = kv

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, table: list[int], start: int) -> Tensor:
        """Attention of queries [n, Hq, D] over the sequence's K/V in `keys` and `values` [N, B, Hkv, D]."""
        end = start + len(query)
        return causal_attention(query, keys[table[0], :end], values[table[0], :end], start)
