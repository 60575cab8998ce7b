"""What an engine of mini may do next, and the sentence that says what it did wrong."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, get_args, get_origin, get_type_hints

import torch

from milestones.mini.given.contract import Limits, Step


class Rejected(AssertionError):
    """What an engine did wrong, in a sentence."""


@dataclass(frozen=True)
class Ask:
    """A request, with the greedy answer that it should get."""

    id: str
    prompt: Sequence[int]
    answer: Sequence[int]
    arrives: int = 0  # before which step
    num_certain: int = 1 << 30  # so many of the answer's first tokens are no close call; those after may differ
    overwritten: Mapping[int, int] = field(
        default_factory=dict
    )  # when so many tokens are computed, V of this one changes
    note: str = ""  # what a wrong token means where the harness interferes

    @property
    def max_tokens(self) -> int:
        return len(self.answer)


@dataclass
class Served:
    """What the ledger knows of a request."""

    ask: Ask
    tokens: list[int]  # known so far
    launched: int = 0  # tokens of the answer that steps have sampled, in flight or known
    computed: int = 0
    table: list[int] = field(default_factory=list)
    diverged: bool = False  # it took another way at a close call

    @property
    def num_answered(self) -> int:
        return len(self.tokens) - len(self.ask.prompt)

    @property
    def length(self) -> int:
        """Its tokens, those in flight included."""
        return len(self.ask.prompt) + self.launched


class Ledger:
    """Follows an engine step by step. It believes nothing: what a step says has to fit what the steps before it said."""

    def __init__(self, asks: Sequence[Ask], limits: Limits, stage: int) -> None:
        self.limits, self.stage = limits, stage
        self.served: dict[str, Served] = {}
        self.number = 0  # of the step
        self.due: list[set[str]] = [set(), set()]  # whose tokens the step before has sampled, and this one
        # What each block holds, where it is full of tokens that were computed: (the tokens of its sequence, where they end).
        self.contents: dict[int, tuple[list[int], int]] = {}

    @property
    def is_done(self) -> bool:
        return not self.unfinished

    @property
    def unfinished(self) -> list[str]:
        """Who does not have all of its tokens, and how many it has."""
        left = [one for one in self.served.values() if one.num_answered < one.ask.max_tokens]
        return [f"{one.ask.id} ({one.num_answered} of {one.ask.max_tokens})" for one in left]

    def add(self, ask: Ask) -> None:
        self.served[ask.id] = Served(ask, list(ask.prompt))

    def update(self, step: Step) -> None:
        """Add the tokens of a step that has passed `form`, unchecked."""
        for id, token in step.tokens.items():
            self.served[id].tokens.append(token)
        self.number += 1

    def check(self, step: Step, cache: torch.Tensor | None = None) -> None:
        """Check a step that has passed `form`, and update what is known of the requests and blocks.

        `cache` is that of an engine whose steps are over when they return; it is searched for poison.

        Raises:
            Rejected: the step cannot be right.
        """
        self._preempted(step)
        if self.stage >= 2:
            self._budgets(step)
            self._stores(step)
            self._tables(step)
        for id, start, n in step.work:
            self._work(id, start, n)
        if cache is not None:
            self._poison(step, cache)
        waiting = self.unfinished
        self._tokens(step)
        if not step.work and not step.tokens:
            self.wrong(f"did nothing, and these wait for tokens: {', '.join(waiting)}")
        self.number += 1

    def overwrites(self, step: Step) -> Iterator[tuple[int, int, int]]:
        """What the harness overwrites after this step: (block, place in it, position of the token)."""
        for id, start, n in step.work:
            position = self.served[id].ask.overwritten.get(start + n)
            if position is not None:
                place, offset = divmod(position, self.limits.block_size)
                yield step.tables[id][place], offset, position

    def wrong(self, what: str) -> NoReturn:
        """Raise Rejected: the step did this."""
        raise Rejected(f"step {self.number} {what}")

    # -- what a step says --------------------------------------------------------------------------------------------

    def form(self, step: Any) -> None:
        """Check that this is a `Step`, and that the requests, tokens and blocks which it names may exist.

        Raises:
            Rejected: it is none, or they cannot. Such a step is no part of a trace.
        """
        if getattr(step, "_fields", ()) != Step._fields:
            self.wrong(f"returned {step!r}, and not Step(work, tables, tokens, preempted)")
        for name, kind in get_type_hints(Step).items():
            if not _fits(value := getattr(step, name), kind):
                self.wrong(f"returned a Step whose {name} are {value!r}, and not {kind}")
        ids = [id for id, _, _ in step.work]
        for id in sorted({*ids, *step.tables, *step.tokens, *step.preempted} - self.served.keys()):
            self.wrong(f"names {id!r}, and nobody of that name came")
        if twice := [id for id in ids if ids.count(id) > 1]:
            self.wrong(f"has {twice[0]} twice in its work")
        if bad := [work for work in step.work if work[1] < 0 or work[2] < 1]:
            self.wrong(
                f"has {bad[0]} in its work: tokens are counted from 0, and whoever is in it computes one at least"
            )
        for id, table in step.tables.items() if self.stage >= 2 else ():
            if missing := [block for block in table if not 0 <= block < self.limits.num_blocks]:
                self.wrong(f"gives {id} block {missing[0]}, and there are blocks 0 to {self.limits.num_blocks - 1}")

    def _preempted(self, step: Step) -> None:
        for id in step.preempted:
            one = self.served[id]
            if not one.table:
                self.wrong(f"preempts {id}, which holds no block")
            if id in step.tables:
                self.wrong(f"preempts {id}, which has blocks {step.tables[id]}: who gives way has none in that step")
            one.computed, one.table = 0, []

    def _budgets(self, step: Step) -> None:
        num_tokens, num_seqs = sum(n for _, _, n in step.work), len(step.tables)
        if num_tokens > self.limits.max_tokens:
            parts = ", ".join(f"{id} {n}" for id, _, n in step.work)
            self.wrong(f"computes {num_tokens} tokens ({parts}), and the budget is {self.limits.max_tokens}")
        if num_seqs > self.limits.max_seqs:
            ids = ", ".join(step.tables)
            self.wrong(f"has {num_seqs} sequences with blocks ({ids}), and {self.limits.max_seqs} may run")

    def _work(self, id: str, start: int, n: int) -> None:
        one, end = self.served[id], start + n
        done = f"computes tokens {start} to {end} of {id}"
        if one.launched == one.ask.max_tokens:
            self.wrong(f"{done}, which has all of its {one.launched} tokens")
        if end > one.length:
            self.wrong(f"{done}, which has {one.length}")
        if start != one.computed:
            self.wrong(f"{done}, of which tokens 0 to {one.computed} are in the cache")
        one.computed = end
        if end == one.length:
            one.launched += 1
            self.due[1].add(id)

    # -- blocks ------------------------------------------------------------------------------------------------------

    def _tables(self, step: Step) -> None:
        for id, one in self.served.items():
            if one.table and id not in step.tables and one.launched < one.ask.max_tokens:
                self.wrong(f"has no table of {id}, which held blocks {one.table} and was not preempted")
        holders: dict[int, tuple[str, int]] = {}
        starts = {id: start for id, start, _ in step.work}
        for id, table in step.tables.items():
            self._table(id, table, starts.get(id))
            for place, block in enumerate(table):
                if block in holders:
                    self._shared(block, (id, place), holders[block])
                holders[block] = id, place
        for id, start, n in step.work:
            table = step.tables.get(id, [])
            if (room := len(table) * self.limits.block_size) < start + n:
                self.wrong(f"computes tokens {start} to {start + n} of {id}, whose blocks {table} have room for {room}")
        for id, one in self.served.items():
            one.table = list(step.tables.get(id, []))

    def _table(self, id: str, table: list[int], start: int | None) -> None:
        one, size = self.served[id], self.limits.block_size
        if one.num_answered == one.ask.max_tokens:
            self.wrong(f"still has blocks {table} for {id}, which is done: they go back at once")
        if twice := [block for block in table if table.count(block) > 1]:
            self.wrong(f"has block {twice[0]} twice in the table {table} of {id}: its tokens overwrite each other")
        if one.table and table[: len(one.table)] != one.table:
            why = "what was stored is lost, unless the engine changed its own list later: copy it"
            self.wrong(f"changed the table of {id} from {one.table} to {table}: {why}")
        if one.table or not start:
            return
        if self.stage < 5:
            self.wrong(f"begins {id} with token {start}: nothing of it was computed")
        for place, block in enumerate(table[: -(-start // size)]):
            self._found(one, place, block)
        one.computed = start

    def _found(self, one: Served, place: int, block: int) -> None:
        """A newcomer begins with this block: it has to hold the newcomer's tokens, and all before them."""
        tokens, end = self.contents.get(block, ([], 0))
        held, wanted = tokens[:end], one.tokens[: (place + 1) * self.limits.block_size]
        if held != wanted:
            pairs = enumerate(zip(held, wanted, strict=False))
            first = next((i for i, (a, b) in pairs if a != b), min(len(held), len(wanted)))
            said = f"the K/V of other tokens, from token {first} on" if held else "nothing that is whole"
            self.wrong(f"begins {one.ask.id} with block {block} as its block {place}, and that holds {said}")

    def _shared(self, block: int, one: tuple[str, int], other: tuple[str, int]) -> None:
        both = f"block {block} in the tables of {other[0]} and {one[0]}"
        if self.stage < 5:
            self.wrong(f"has {both}: a block has one owner")
        end = (one[1] + 1) * self.limits.block_size
        if one[1] != other[1] or self.served[one[0]].tokens[:end] != self.served[other[0]].tokens[:end]:
            self.wrong(f"has {both}, whose tokens up to there are different")

    def _stores(self, step: Step) -> None:
        """Note what the step's blocks hold: all K/V of a step are stored before any are read."""
        size = self.limits.block_size
        users = defaultdict[int, set[str]](set)  # who had each block before the step, and who stores into it
        for id in step.tables:
            for block in self.served[id].table:
                users[block].add(id)
        for id, start, n in step.work:
            table = step.tables.get(id, [])
            for place in range(start // size, min(-(-(start + n) // size), len(table))):
                block, last = table[place], (place + 1) * size
                if self.stage >= 5 and (others := users[block] - {id}):
                    token = max(start, place * size)
                    self.wrong(f"stores token {token} of {id} into block {block}, which {min(others)} has, too")
                users[block].add(id)
                self.contents.pop(block, None)
                if last <= start + n:
                    self.contents[block] = self.served[id].tokens, last

    def worthless_blocks(self) -> list[int]:
        """Blocks that nobody may read: held by no sequence that goes on, and from stage 5 on not full, either."""
        held = {block for one in self.served.values() if one.launched < one.ask.max_tokens for block in one.table}
        kept = held | (self.contents.keys() if self.stage >= 5 else set())
        return [block for block in range(self.limits.num_blocks) if block not in kept]

    def _poison(self, step: Step, cache: torch.Tensor) -> None:
        """Look at what the step's sequences have in the cache; NaN there was never stored."""
        size = self.limits.block_size
        for id, start, n in step.work:
            table, positions = torch.tensor(self.served[id].table), torch.arange(start + n)
            values = cache[:, :, table[positions // size], positions % size]  # [L, 2, n, Hkv, D]
            bad = values.isnan().any(-1).any(-1).any(0).any(0).nonzero().flatten().tolist()
            if bad:
                where = f"block {self.served[id].table[bad[0] // size]}, place {bad[0] % size}"
                why = "the tensor that engine.cache was at first has NaN there, so nothing was stored, or NaN was"
                self.wrong(f"read the K/V of token {bad[0]} of {id} in {where}: {why}")

    # -- tokens ------------------------------------------------------------------------------------------------------

    def _tokens(self, step: Step) -> None:
        before, now = self.due
        late = {*now} if self.stage < 6 else {*before}
        if missing := sorted(late - step.tokens.keys()):
            self.wrong(f"has no token of {missing[0]}, whose newest token was computed")
        if early := sorted(step.tokens.keys() - before - now):
            self.wrong(f"has a token of {early[0]}, whose newest token was not computed")
        for id, token in step.tokens.items():
            self._token(id, token)
        self.due = [now - (step.tokens.keys() - before), set()]  # who had a token due has that one now

    def _token(self, id: str, token: int) -> None:
        one = self.served[id]
        i, position, answer = one.num_answered, len(one.tokens), one.ask.answer
        if i >= one.ask.num_certain and token != answer[i]:
            one.diverged = True
        if token != answer[i] and not one.diverged:
            where = f"at position {position} (token {i} of its answer)"
            said = f"gives {id} token {token} {where}, and {answer[i]} is right"
            if one.table:
                block = one.table[(position - 1) // self.limits.block_size]
                said += f"; the token before it is in block {block} of its blocks {one.table}"
            self.wrong(said + one.ask.note)
        one.tokens.append(token)


def _fits(value: object, kind: Any) -> bool:
    """Whether a value has the type that this annotation of `Step` says, down to the numbers."""
    outer, inner = get_origin(kind) or kind, get_args(kind)
    if not isinstance(value, outer):
        return False
    if outer is tuple:
        return len(value) == len(inner) and all(map(_fits, value, inner))
    if outer is dict:
        return all(_fits(one, inner[0]) and _fits(value[one], inner[1]) for one in value)
    return outer is not list or all(_fits(one, inner[0]) for one in value)
