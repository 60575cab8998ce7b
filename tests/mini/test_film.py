"""The recording of an engine of mini: the inspector reads it, and it tells what the steps said."""

from __future__ import annotations

from pathlib import Path

import pytest

from folovllm.apps.inspector.lines import StepBegan, StepEnded, parse
from folovllm.apps.inspector.page import one_file
from folovllm.apps.inspector.watcher import Watcher
from milestones.mini.film import recording
from tests.mini.conftest import reference


@pytest.mark.parametrize("stage", range(7))
def test_the_inspector_plays_it(stage: int, tmp_path: Path) -> None:
    trace = reference(stage)
    text = recording(trace, "mini", "tiny", {i: chr(i) for i in range(32, 127)}, stage)
    said, state = dict[int, list[int]](), Watcher()
    for turn in parse(text, "mini.jsonl").turns():
        state(turn.events)
        for event in turn.events:
            if isinstance(event, StepEnded):
                for seq_id, ids in event.sampled:
                    said.setdefault(seq_id, []).extend(ids)
    assert [said[i] for i in range(3)] == [list(ask.answer) for ask in trace.asks]
    assert not state.sequences, "everybody has ended"
    assert all(cell.ref_count == 0 and cell.is_free for cell in state.cells), "all blocks are free in the end"
    file = tmp_path / "mini.jsonl"
    file.write_text(text, encoding="utf-8")
    one_file([file], tmp_path / "mini.html")
    assert "folovllm recording" in (tmp_path / "mini.html").read_text("utf-8")


def test_tables_are_those_of_the_steps() -> None:
    trace = reference(5)
    state, turns = Watcher(), parse(recording(trace, "mini", "tiny", {}, 5), "mini").turns()
    for turn in turns:
        for event in turn.events:
            state([event])
            if isinstance(event, StepBegan):
                tables = {"abc"[id]: list(seq.block_table) for id, seq in state.sequences.items() if seq.block_table}
                assert tables == trace.steps[event.step].tables
                assert all(cell.ref_count > 0 for table in tables.values() for cell in (state.cells[b] for b in table))
