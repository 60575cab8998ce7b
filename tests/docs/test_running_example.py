"""A, B and C: the file is what the model and its tokenizer say, and the book's pictures are what the engine does."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from types import ModuleType

import numpy as np
import pytest
from transformers import AutoTokenizer

from folovllm.cache.slot_manager import SlotManager
from milestones.pictures import step
from milestones.running_example import Run, ScheduledSequence, example, play
from tests.docs.blocks import ROOT

MILESTONES = ("m1", "m2", "m3", "m4", "m5", "m6")
PAGES = [*(ROOT / "docs").rglob("*.md"), *(ROOT / "notebooks/src").glob("*.py")]


@pytest.fixture(scope="module")
def tools() -> Iterator[dict[str, ModuleType]]:
    sys.path.insert(0, str(ROOT / "docs/_tools"))
    yield {name: importlib.import_module(name) for name in ("pictures", "example_tables")}
    sys.path.remove(str(ROOT / "docs/_tools"))


def test_the_ids_are_the_tokenizers() -> None:
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "folovllm/assets/stories-5m")
    for request in example().requests:
        assert tokenizer.encode(request.prompt) == list(request.prompt_token_ids)
        assert tokenizer.decode(request.answer_token_ids) == request.answer
        assert len(request.answer_token_ids) == request.max_tokens
        assert all(example().texts[token] == tokenizer.decode([token]) for token in request.token_ids)


@pytest.mark.slow
@pytest.mark.parametrize("milestone", MILESTONES)
def test_every_milestone_gives_the_same_answers(milestone: str, tools: dict[str, ModuleType]) -> None:
    run: Run = tools["pictures"].run(milestone)
    assert run.answers == {request.name: request.answer_token_ids for request in example().requests}


def test_each_thing_begins_in_its_milestone(tools: dict[str, ModuleType]) -> None:
    """What the chapters count on; a scheduler or a cache that does something else changes it."""
    found = {what: (milestone, step) for what, milestone, step, _ in tools["example_tables"].firsts()}
    assert found == {
        "a wait": ("M1", 0), "a batch": ("M2", 1), "a wait for tokens": ("M2", 0), "a wait for memory": ("M2", 2),
        "a block table": ("M3", 0), "a preemption": ("M3", 4), "a recomputation": ("M3", 7),
        "a chunk": ("M5", 0), "a prefix hit": ("M5", 2), "a return with cached blocks": ("M5", 7), "an overlap": ("M6", 0),
    }  # fmt: skip


def test_a_turn_says_what_the_engine_did(tools: dict[str, ModuleType]) -> None:
    """One step by hand: A needs a fourth block, all ten are held, and C gives its three back."""
    turn = tools["pictures"].run("m3").turns[4]
    assert turn.before.tables == {"A": (0, 1, 2), "B": (3, 4, 5, 6), "C": (7, 8, 9)}
    assert (turn.preempted, turn.lost) == ({"C": "A"}, {"C": 10})
    assert turn.after.tables == {"A": (0, 1, 2, 9), "B": (3, 4, 5, 6)}
    a, b = example().request("A").token_ids, example().request("B").token_ids
    assert turn.scheduled_seqs == (
        ScheduledSequence("A", 12, 13, (a[12],), (36,), True),
        ScheduledSequence("B", 14, 15, (b[14],), (26,), True),
    )
    assert turn.drawn == {"A": a[13], "B": b[15]}
    assert turn.after.memory[36:38] == (("A", 12), ("C", 9)), "A overwrites the last block of C, slot by slot"


def test_static_batching_keeps_c_outside(tools: dict[str, ModuleType]) -> None:
    static = tools["pictures"].run("m2", static=True)
    assert [turn.number for turn in static.turns if "C" in turn.outside] == list(range(2, 10))
    assert static.answers == tools["pictures"].run("m2").answers


def test_wrong_code_can_be_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """A learner sees what the mistake does: here slots are counted from the share's own start."""
    wrong = lambda table, size, start, end: np.arange(table[0] * size, table[0] * size + end - start)  # noqa: E731
    monkeypatch.setattr(SlotManager, "slots", staticmethod(wrong))
    run = play("m2")
    assert run.answers["A"] != example().request("A").answer_token_ids
    assert run.turns[3].after.memory[0] == ("A", 11) and ">A11 " in step(run, 3)


@pytest.mark.slow
def test_the_pictures_are_the_engines(tools: dict[str, ModuleType]) -> None:
    for name, draw in tools["pictures"].PICTURES.items():
        kept = (ROOT / "docs/img" / f"{name}.svg").read_text("utf-8")
        assert draw() == kept, f"{name}: the engine does something else by now. Look at it, then: make recordings"


def test_every_picture_is_drawn_and_shown(tools: dict[str, ModuleType]) -> None:
    kept = {file.stem for prefix in ("abc", "x4") for file in (ROOT / "docs/img").glob(f"{prefix}_*.svg")}
    shown = {name for page in PAGES for name in re.findall(r"img/((?:abc|x4)_\w+)\.svg", page.read_text("utf-8"))}
    assert kept == set(tools["pictures"].PICTURES) == shown


class TestWhatChapters1To3Say:
    """The tables in them are written by the engine; the numbers in their text are not."""

    def test_steps_and_first_tokens(self, tools: dict[str, ModuleType]) -> None:
        run = tools["pictures"].run
        runs = {"M1": run("m1"), "static": run("m2", static=True), "M2": run("m2"), "M3": run("m3")}
        assert {name: len(run.turns) for name, run in runs.items()} == {"M1": 23, "static": 17, "M2": 14, "M3": 12}
        first = {name: next(turn.number for turn in run.turns if "C" in turn.drawn) for name, run in runs.items()}
        assert first == {"M1": 16, "static": 10, "M2": 7, "M3": 2}

    def test_the_blocks_of_m3(self, tools: dict[str, ModuleType]) -> None:
        turns = tools["pictures"].run("m3").turns
        assert next(turn.number for turn in turns if len(turn.after.tables.get("A", ())) > 3) == 4
        assert next(turn.number for turn in turns if len(turn.after.tables.get("A", ())) > 4) == 8
        assert (turns[7].after.tables["C"], turns[7].scheduled_seqs[1].slots[-1]) == ((7, 8, 6), 26), (
            "the list was 7, 8, 6, 5, 4, 3"
        )
        assert turns[6].scheduled_seqs[0].slots == (38,), "A's token 14"
        assert turns[6].scheduled_seqs[1].slots == (32,), "B's token 16 begins block 8"


def chapter(name: str) -> str:
    return (ROOT / "docs" / f"{name}.md").read_text("utf-8")


@pytest.mark.slow
class TestWhatChapters4To6Say:
    def test_m4_does_what_m3_did(self, tools: dict[str, ModuleType]) -> None:
        run = tools["pictures"].run
        assert run("m4").turns == run("m3").turns, "chapter 4: the same steps, the same blocks"
        (scheduled, _) = run("m4").turns[4].scheduled_seqs
        assert (scheduled.token_ids, scheduled.start, scheduled.slots) == ((304,), 12, (36,)), (
            "chapter 4 follows this token"
        )

    def test_what_m4_and_m5_compute(self, tools: dict[str, ModuleType]) -> None:
        four, five = (tools["pictures"].run(milestone) for milestone in ("m4", "m5"))
        for run, tokens, steps in ((four, 60, 12), (five, 42, 10)):
            computed = (scheduled.end - scheduled.start for turn in run.turns for scheduled in turn.scheduled_seqs)
            assert (sum(computed), len(run.turns)) == (tokens, steps)
        assert "M4 computes 60 tokens for the three answers, and M5 computes 42 tokens." in " ".join(
            chapter("5_reuse").split()
        )
        assert (five.turns[2].hits, five.turns[7].hits) == ({"C": 8}, {"C": 12})
        chunk = five.turns[1].scheduled_seqs[1]
        assert (chunk.name, chunk.start, chunk.end) == ("B", 3, 12), "chapter 4 asks for its cu_seqlens"
