"""The page's reducer, in the browser: after every step it has the engine's own cells and sequences, whoever wrote the engine."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from folovllm.apps.inspector.watcher import Cell, Watcher
from folovllm.engine.llm_engine import LLMEngine
from tests.course import test_watcher as wrong
from tests.inspector.browser import Shown, shown
from tests.inspector.test_recording import Taped
from tests.m5.test_events import World, cells_of, engine
from tests.x3.engines import Anything, speculation_of, speculative
from tests.x3.test_events import NoJudge

pytestmark = pytest.mark.slow
SEEN = {"m3.4_leaks": "lost", "m5.4_found_and_free": "torn"}  # wrong answers, and what becomes of a block

STATES = """
const {readRecording} = await import("inspector/lines.js");
const {stateOfCell} = await import("inspector/cells.js");
const recording = await readRecording(it.text);
const told = (at) => {
  const state = recording.stateAt(at);
  const cells = Array.from({length: state.numBlocks}, (_, i) =>
    [state.refCount[i], state.isFree[i], state.hash[i], state.serial[i], state.parent[i], stateOfCell(state, i)]);
  const seqs = [...state.sequences.values()].map((seq) =>
    [seq.seqId, seq.isRunning, seq.numTokens, seq.numComputed, [...seq.table], seq.refused]);
  const held = state.holders().map((held) => (held ?? []).map(({seq, filled}) => [seq.seqId, filled]));
  const rest = [state.totals, [...state.freedAt], [...state.originSeq], [...state.originPlace], recording.columns.drawn[at]];
  return {cells, seqs, held, used: state.numUsed, steps: state.numSteps, rest: JSON.stringify(rest)};
};
const states = recording.moments.map((_, at) => told(at));
const strayed = it.walk.filter((at) => JSON.stringify(told(at)) !== JSON.stringify(states[at]));
const tokens = Object.fromEntries([...recording.infos].map(([id, info]) => [id, [...info.prompt, ...info.drawn]]));
return {states, strayed, tokens};
"""


class Watched(Taped):
    """A world that is recorded; after each moment it notes what the cache manager says, too."""

    def __init__(self, served: LLMEngine, seed: int) -> None:
        super().__init__(served, seed)
        self.own = dict[int, list[Cell]]()

    def play(self, turns: int) -> None:
        """Take turns; wrong code may raise what it likes in one: the blocks are compared all the same."""
        kv = getattr(self.engine.scheduler, "kv", None)
        for _ in range(turns):
            try:
                self.turn()
            except Exception:
                if self.is_right:
                    raise
                self.engine.events.drain()
            if kv is not None:
                self.own[len(self.states) - 1] = cells_of(kv)

    is_right = True


def state_of(watcher: Watcher) -> dict[str, Any]:
    """All that a watcher knows, as the page says it."""
    return {
        "cells": [cell_of(cell) for cell in watcher.cells],
        "seqs": [
            [id_, seq.is_running, seq.num_tokens, seq.num_computed_tokens, list(seq.block_table), seq.refused]
            for id_, seq in watcher.sequences.items()
        ],
        "held": [[[seq.added.seq_id, filled] for seq, filled in held] for held in watcher.holders()],
        "used": sum(not cell.is_free for cell in watcher.cells),
    }


def cell_of(cell: Cell) -> list[Any]:
    """A cell as the page says it, with the name of its state."""
    if cell.is_free:
        kind = "torn" if cell.ref_count else "free" if cell.hash is None else "cached"
    else:
        kind = "lost" if cell.ref_count == 0 else "owned" if cell.ref_count == 1 else "shared"
    hash_ = None if cell.hash is None else f"{cell.hash:016x}"[:8]
    return [cell.ref_count, int(cell.is_free), hash_, cell.serial, cell.parent, kind]


@pytest.fixture(scope="module")
def here(browser: Any) -> Iterator[Shown]:
    with shown(browser) as page:
        page.open("m1.jsonl")
        yield page


def assert_page_agrees(here: Shown, world: Watched) -> dict[str, Any]:
    """Forward through all moments, and then to and fro: the page's state is the watcher's, and the manager's own."""
    world.recorder.close()
    last = len(world.states) - 1
    die = random.Random(last)
    walk = [die.randint(0, last) for _ in range(60)] + list(range(last, max(-1, last - 40), -1))
    told: dict[str, Any] = here.run(STATES, {"text": world.data.decode(), "walk": walk})
    assert told["strayed"] == [], "going back and forth gives another state"
    assert len(told["states"]) == len(world.states)
    for at, (seen, state) in enumerate(zip(told["states"], map(state_of, world.states), strict=True)):
        assert {name: seen[name] for name in state} == state, f"at moment {at}"
        if at in world.own:
            assert seen["cells"] == [cell_of(cell) for cell in world.own[at]], (
                f"the cache manager itself, at moment {at}"
            )
    return told


@pytest.mark.parametrize(
    ("milestone", "turns", "before", "drafts"),
    [("m1", 100, 0, 0), ("m2", 300, 0, 0), ("m6", 300, 0, 0), ("m6", 60, 25, 0), ("m5", 120, 0, 5), ("m6", 120, 0, 5)],
)
def test_every_cell_is_the_engines_own(here: Shown, milestone: str, turns: int, before: int, drafts: int) -> None:
    """After each random step: through prefix hits, chunks, preemptions, refusals, aborts and evictions.

    Also where the recording begins while requests run, and with drafts: of rejected tokens, and blocks that were cut off, no
    trace is left.
    """
    served = engine(milestone, **(speculative(Anything(), k=drafts) if drafts else {}))
    early = World(served, 3)
    for _ in range(before):
        early.turn()
    world = Watched(served, 1)
    world.names = 1000
    if drafts:
        served.core.executor = NoJudge(served.executor.num_kv_blocks, world.die)  # type: ignore[assignment]
    world.play(turns)
    assert len(world.own) >= (turns if milestone != "m1" else 0)
    told = assert_page_agrees(here, world)
    for state in told["states"]:
        assert all(bool(held) != cell[1] for held, cell in zip(state["held"], state["cells"], strict=True)), (
            "drawn as what only wrong code makes"
        )
    for seq in (*served.scheduler.running, *served.scheduler.waiting):
        assert told["tokens"][str(seq.seq_id)] == seq.token_ids.tolist()
    if drafts:
        assert speculation_of(served).num_draft_tokens > speculation_of(served).num_accepted > 0


@pytest.mark.parametrize("answer", [each for each in wrong.ANSWERS if each.id in SEEN], ids=lambda answer: answer.id)
def test_it_shows_what_wrong_code_did(here: Shown, answer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that nobody holds and that are not free, or that are free and held. (`tests/course/test_watcher.py` has every wrong answer.)"""
    wrong.put_in(answer, monkeypatch)
    world = Watched(engine(wrong.MILESTONES[answer.exercise.id]), 0)
    monkeypatch.setattr(world, "compare", lambda: None)
    world.is_right = False
    world.play(50)
    told = assert_page_agrees(here, world)
    assert SEEN[answer.id] in {cell[5] for state in told["states"] for cell in state["cells"]}
