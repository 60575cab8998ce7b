"""Tables of the builders and of what our own components score, for docs/reference/builders.md."""

from __future__ import annotations

from pathlib import Path

from milestones.builders import score_table
from milestones.manifest import Course

COURSE = Course(Path(__file__).resolve().parents[2])


def builder_table() -> str:
    """One row for each builder."""
    rows = ["| | you build | protocol | chosen by | minutes |", "|---|---|---|---|---|"]
    for b in COURSE.builders:
        protocol = f"`{b.protocol.partition(':')[2]}` in `{b.protocol.partition(':')[0]}`"
        rows.append(f'| **{b.milestone.upper()}** | {b.title} | {protocol} | `builders="{b.name}"` | {b.minutes} |')
    return "\n".join(rows)


def scores(milestone: int) -> str:
    """What the engine's own and the reference score; the same on every machine."""
    return score_table(COURSE.builder(f"m{milestone}"), None)
