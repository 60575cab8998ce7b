"""The notebooks' minis are the reference: there is one code, and a cell that shows a file has all of it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from milestones.mini import harness
from milestones.mini.given.contract import Limits
from milestones.mini.harness import REFERENCE
from tests.helpers import prompts, tiny_checkpoint
from tests.mini.conftest import answer

SOURCES = sorted((Path(__file__).resolve().parents[2] / "notebooks/src").glob("m[1-6]_*.py"))
SHOWN = ["model.py", "engine.py", "blocks.py", "attention.py", "prefix.py", "overlap.py"]  # by milestone


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.stem)
def test_a_cell_has_the_whole_file(source: Path) -> None:
    cells = re.split(r"^# %%.*\n", source.read_text("utf-8"), flags=re.M)
    found = [match for cell in cells if (match := re.match(r"# milestones/mini/reference/(\w+\.py)\n(.*)", cell, re.S))]
    assert [match[1] for match in found] == [SHOWN[int(source.name[1]) - 1]]
    for name, text in (match.groups() for match in found):
        assert text.strip() == (REFERENCE / name).read_text("utf-8").strip(), f"paste {name} into its cell anew"


def test_serve_for_notebooks() -> None:
    """Without a check: the answers, and all steps."""
    adapters, requests = harness.load(REFERENCE), [(prompt, 5) for prompt in prompts([4, 9])]
    engine = harness.make(adapters, tiny_checkpoint(), Limits(8, 4, 2, 32), harness.Stream(), 6)
    answers, steps = harness.serve(engine, requests)
    assert answers == [answer(tiny_checkpoint(), tuple(prompt), 5)[0] for prompt, _ in requests]
    assert len(steps) == 6 and not steps[-1].work
