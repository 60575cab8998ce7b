"""A long recording of a steady load, made without an engine: requests of 40 tokens that draw 60 to 139, a newcomer wherever a row is free."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from tests.inspector.browser import lines_of

PROMPT, SIZE, BUDGET, STEP = 40, 16, 256, 4000  # tokens, tokens, tokens, microseconds


@dataclass(slots=True)
class Steady:
    """A pool of blocks and the requests that are served."""

    num_blocks: int = 1024
    num_rows: int = 32
    free: list[int] = field(default_factory=list)
    tables: dict[int, list[int]] = field(default_factory=dict)
    computed: dict[int, int] = field(default_factory=dict)
    left: dict[int, int] = field(default_factory=dict)  # tokens to draw
    names: int = 0

    def recording(self, steps: int) -> str:
        """The lines of so many steps."""
        self.free = list(range(self.num_blocks))
        header = lines_of("m3.jsonl")[0]
        header["engine"] |= {"num_kv_blocks": self.num_blocks, "block_size": SIZE, "max_num_seqs": self.num_rows}
        blank = {"steps": 0, "free": "1" * self.num_blocks, "refs": [0] * self.num_blocks, "named": [], "sequences": []}
        lines = [header, ["texts", {str(i): f" w{i}" for i in range(64)}], ["key", 0, 0, blank]]
        lines += [["turn", step, step * STEP + 3950, self.turn(step)] for step in range(steps)]
        return "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)

    def turn(self, step: int) -> list[Any]:
        """The events of a step: all decode, one may come, some end."""
        events: list[Any] = []
        scheduled_seqs = [self.decode(seq, events) for seq in self.tables]
        if len(self.tables) < self.num_rows:
            scheduled_seqs.append(self.admit(step, events))
        start, scheduled, arrived, end = (step * STEP + after for after in (0, 30, 3900, 3950))
        seqs = list(self.tables)
        events.append(["begin", step, start, scheduled, scheduled_seqs, BUDGET - len(seqs)])
        for seq in seqs:
            self.left[seq] -= 1
        over = [seq for seq in seqs if self.left[seq] == 0]
        for seq in over:
            events += [["free", *self.tables[seq]], ["table", seq, self.tables[seq]]]
            self.free += self.tables.pop(seq)
        used = self.num_blocks - len(self.free)
        events.append(["end", step, start, arrived, end, seqs, [seq % 64 for seq in seqs], 0, used])
        return events + [["finish", seq, "length"] for seq in over]

    def decode(self, seq: int, events: list[Any]) -> Any:
        """A share of one token, with a block now and then."""
        place = self.computed[seq]
        self.computed[seq] += 1
        if place % SIZE:
            return seq
        block = self.free.pop(0)
        events.append(["new", block])
        self.tables[seq].append(block)
        return [seq, place, 1, 1, len(self.tables[seq]) - 1, [block]]

    def admit(self, step: int, events: list[Any]) -> Any:
        """The whole prompt of a newcomer."""
        seq, blocks = self.names, [self.free.pop(0) for _ in range(-(-PROMPT // SIZE))]
        self.names += 1
        self.tables[seq], self.computed[seq], self.left[seq] = list(blocks), PROMPT, 60 + seq * 7 % 80
        events.append(["add", seq, f"r{seq}", 0, [seq % 64] * PROMPT, 200, 0, step * STEP])
        events += [["new", *blocks], ["admit", seq, 0]]
        return [seq, 0, PROMPT, 1, 0, blocks]
