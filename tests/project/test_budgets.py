"""No part of the engine grows beyond what is stored in docs/data/budgets.txt, or beyond its budget."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tools import budgets

ROOT = Path(__file__).resolve().parents[2]
STORED = {
    name.strip(): int(number.replace(",", ""))
    for name, number in re.findall(r"^(\S.*?)  +([\d,]+)", (ROOT / "docs/data/budgets.txt").read_text(), re.M)
}
SLACK = 1.01  # a fix may need a few lines


@pytest.fixture(scope="module")
def now() -> dict[str, tuple[int, ...]]:
    return budgets.sizes(ROOT)


@pytest.mark.parametrize(
    "part",
    [
        "core",
        *(part for part in budgets.PARTS if part in STORED),
        "folovllm/",
        "import circles",
        "arrows from core to electives",
    ],
)
def test_it_does_not_grow(part: str, now: dict[str, tuple[int, ...]]) -> None:
    most = max(STORED[part], budgets.BUDGETS[part][0])
    assert now[part][0] <= SLACK * most, (
        f"{part}: {now[part][0]:,} now, {most:,} before: make it smaller, or store `python -m tools.budgets` and say why"
    )
