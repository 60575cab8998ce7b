"""From mini to vLLM: what the table names is here and in mini, and a name finds its lines. vLLM's side: `docs/_tools/from_mini.py VLLM`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "docs/_tools"))
from from_mini import missing, rows  # noqa: E402

from milestones.cli import app  # noqa: E402
from milestones.manifest import Course  # noqa: E402


def test_each_symbol_is_there() -> None:
    assert missing(None) == []
    assert len({row["ours"] for row in rows()}) == len(rows())


def test_most_exercises_of_the_milestones_are_in_it() -> None:
    """A tile of a kernel and a part of a ring have no function of their own in vLLM."""
    named = {row["ours"] for row in rows()}
    exercises = [e for e in Course(ROOT).exercises if e.id.startswith("m")]
    found = [e.id for e in exercises if any(str(s).removeprefix("folovllm.") in named for s in e.symbols)]
    assert len(found) >= 0.6 * len(exercises)


@pytest.mark.parametrize("name", ["allocate_slots", "Blocks.allocate", "update_from_output"])
def test_a_name_of_any_engine_finds_its_lines(name: str) -> None:
    result = CliRunner().invoke(app, ["where", name])
    assert result.exit_code == 0 and "vLLM" in result.output and name.rpartition(".")[2] in result.output
