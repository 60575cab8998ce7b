"""A recording of an engine of mini, for `folovllm inspect`: the steps as the inspector's lines (docs/reference/recording.md)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from milestones.mini.given.contract import Step
from milestones.mini.harness import Trace

Line = list[Any]


def recording(trace: Trace, title: str, model: str, texts: dict[int, str], stage: int) -> str:
    """The recording as a file's text. `texts` has the text of each token."""
    steps = _Steps(trace, stage)
    lines: list[Any] = [_header(trace, title, model, stage), ["Texts", {str(id): text for id, text in texts.items()}]]
    lines.append(["Turn", 0, 0.0, [steps.beginning()]])
    lines += [["Turn", number + 1, steps.at(number)[1], steps.turn(number)] for number in range(len(trace.steps))]
    lines.append(["Done", len(trace.steps) + 1, steps.at(len(trace.steps) - 1)[1], "closed"])
    return "".join(json.dumps(line) + "\n" for line in lines)


def _header(trace: Trace, title: str, model: str, stage: int) -> dict[str, Any]:
    limits = trace.limits
    engine: dict[str, Any] = {
        "model": model,
        "milestone": f"mini, stage {stage}",
        "kv_cache": "growing" if stage < 2 else "slots" if stage == 2 else "paged",
        "block_size": limits.block_size,
        "num_kv_blocks": limits.num_blocks if stage >= 2 else 0,
        "max_num_seqs": limits.max_seqs if stage >= 2 else 1,
        "max_num_batched_tokens": limits.max_tokens,
        "max_model_len": limits.block_size * (1 if stage == 2 else limits.num_blocks),
        "scheduling": "fcfs",
        "enable_prefix_caching": stage >= 5,
        "enable_chunked_prefill": stage >= 5,
        "async_scheduling": stage >= 6,
        "attention_backend": "mini",
        "device": "cpu",
        "graph_widths": [],
        "mine": True,
    }
    kind = {"format": "folovllm recording", "version": 2, "holds_prompts": True}
    return kind | {"title": title, "started": None, "engine": engine}


class _Steps:
    """Finds what happened between two steps: from the tables, who took, found and gave back which block."""

    def __init__(self, trace: Trace, stage: int) -> None:
        self.trace, self.stage = trace, stage
        self.asks = {ask.id: ask for ask in trace.asks}
        self.seqs = {ask.id: seq for seq, ask in enumerate(sorted(trace.asks, key=lambda ask: ask.arrives))}
        self.waiting = list(self.seqs)  # who has not come yet, in the order of arrival
        self.tables = dict[str, list[int]]()
        self.running, self.done = set[str](), set[str]()
        self.computed = dict[str, int]()
        self.known = {ask.id: len(ask.prompt) for ask in trace.asks}
        self.refs = [0] * (trace.limits.num_blocks if stage >= 2 else 0)
        self.open: list[tuple[int, Step]] = []  # steps that have begun and not ended

    def at(self, number: int) -> tuple[float, float]:
        """Begin and end of a call of `step`, in seconds since the first."""
        zero = self.trace.times[0][0]
        began, ended = self.trace.times[number]
        return round(began - zero, 6), round(ended - zero, 6)

    def beginning(self) -> Line:
        limits = self.trace.limits
        return ["Snapshot", len(self.refs), limits.block_size, limits.max_seqs, limits.max_tokens, 0, [], []]

    def turn(self, number: int) -> list[Line]:
        """What happened in a call of `step`."""
        step = self.trace.steps[number]
        step = step if self.refs else step._replace(tables={})  # there are no blocks before stage 2
        events = [*self._arrivals(number), *self._given_back(step), *self._admitted(step)]
        scheduled = list(self._scheduled(step))
        if step.work:
            began, _ = self.at(number)
            left = self.trace.limits.max_tokens - sum(n for _, _, n in step.work)
            events.append(["StepBegan", number, began, began, scheduled, max(0, left)])
            self.open.append((number, step))
        if self.open and (self.stage < 6 or self.open[0][0] < number or step.tokens):
            events += self._ended(number, step)
        return events

    def _arrivals(self, number: int) -> Iterator[Line]:
        zero, (_, ended) = self.trace.times[0][0], self.trace.times[number]
        while self.waiting and self.trace.arrived.get(self.waiting[0], ended) < ended:
            ask = self.asks[self.waiting.pop(0)]
            when = round(self.trace.arrived[ask.id] - zero, 6)
            yield ["RequestAdded", self.seqs[ask.id], ask.id, 0, list(ask.prompt), ask.max_tokens, 0, when]

    def _given_back(self, step: Step) -> Iterator[Line]:
        """Who held blocks and has none in this step."""
        for id in step.preempted:
            self.running.discard(id)
            by = next((i for i, _, _ in step.work if i in self.running), id)
            yield ["Preempted", self.seqs[id], self.seqs[by], self.computed.pop(id, 0)]
        for id in [id for id in self.tables if id not in step.tables]:
            yield from self._release(id)

    def _release(self, id: str) -> Iterator[Line]:
        table = self.tables.pop(id, [])
        for block in table:
            self.refs[block] -= 1
        for block in reversed(table):
            if not self.refs[block]:
                yield ["BlockFreed", block]
        if table:
            yield ["TableFreed", self.seqs[id], [[block, self.refs[block]] for block in table]]

    def _admitted(self, step: Step) -> Iterator[Line]:
        for id, start, _ in step.work:
            if id in self.running:
                continue
            self.running.add(id)
            found = step.tables.get(id, [])[: start // self.trace.limits.block_size]
            for block in found:
                if not self.refs[block]:
                    yield ["BlockClaimed", block]
                self.refs[block] += 1
                yield ["BlockAdopted", block, self.seqs[id], self.refs[block]]
            if start:
                yield ["PrefixHit", self.seqs[id], start]
            yield ["Admitted", self.seqs[id], start]
            self.tables[id] = []
        tables = (block for table in step.tables.values() for block in table)
        for block in [block for block in dict.fromkeys(tables) if not self.refs[block]]:
            yield from (["BlockClaimed", block], ["BlockTaken", block])
            self.refs[block] = 1

    def _scheduled(self, step: Step) -> Iterator[Line]:
        in_flight = {id for _, other in self.open for id, start, n in other.work if start + n == self.known[id]}
        for row, (id, start, n) in enumerate(step.work):
            num_samples = int(start + n == self.known[id] + (id in in_flight))
            first, table = len(self.tables.get(id, [])), step.tables.get(id, [])
            yield [self.seqs[id], row, start, start + n, num_samples, first, table[first:], -1, -1]
            self.computed[id] = start + n
        for id, table in step.tables.items():
            self.tables[id] = list(table)

    def _ended(self, number: int, step: Step) -> Iterator[Line]:
        (begun, _), (began, ended) = self.open.pop(0), self.at(number)
        ids = list(step.tokens)
        for id in ids:
            self.known[id] += 1
        waits = len(self.seqs.keys() - self.running - self.done - {*self.waiting})
        used, sampled = sum(map(bool, self.refs)), [[self.seqs[id], [step.tokens[id]]] for id in ids]
        yield ["StepEnded", begun, began, ended, ended, sampled, waits, used]
        for id in ids:
            if self.known[id] == len(self.asks[id].prompt) + self.asks[id].max_tokens:
                yield from self._release(id)
                self.running.discard(id)
                self.done.add(id)
                yield ["Finished", self.seqs[id], "length"]
