"""The stored mutants can be made today, and the tool says what became of each."""

import ast
import shutil
from collections import Counter
from pathlib import Path

import pytest

from tools import mutants

STORED = mutants.stored()


@pytest.mark.parametrize("mutant", STORED, ids=lambda mutant: mutant.name)
def test_it_can_be_made(mutant: mutants.Mutant) -> None:
    ast.parse(mutant.source())
    assert mutant.old != mutant.new
    for test in mutant.test.split():
        file, *names = test.partition("[")[0].split("::")
        text = (mutants.ROOT / file).read_text("utf-8")
        assert names and all(f"class {name}" in text or f"def {name}(" in text for name in names), f"no test {test}"


def test_no_two_are_alike() -> None:
    for field in ("name", "behaviour"):
        assert Counter(getattr(mutant, field) for mutant in STORED).most_common(1)[0][1] == 1, field


MODULE = "def half(n: int) -> int:\n    return n // 2\n"
TESTS = """
from folovllm.numbers import half

def test_even():
    assert half(4) == 2

def test_waits():
    while half(4) != 2:
        pass
"""


@pytest.mark.parametrize(
    ("old", "new", "test", "what"),
    [
        ("// 2", "// 3", "test_even", "killed"),
        ("n // 2", "int(n / 2)", "test_even", "survived"),
        ("// 2", "// 3", "test_waits", "too slow"),
        ("// 2", "// 3", "test_odd", "not run"),
        ("n // 2", "n // ", "test_even", "not run"),
        ("n / 2", "n / 3", "test_even", "anchor lost"),
    ],
)
def test_what_becomes_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: str, new: str, test: str, what: str
) -> None:
    (tmp_path / "folovllm/learn").mkdir(parents=True)
    for name in ("__init__.py", "learn/__init__.py", "learn/overlay.py"):
        shutil.copy(mutants.ROOT / "folovllm" / name, tmp_path / "folovllm" / name)
    (tmp_path / "folovllm/numbers.py").write_text(MODULE)
    (tmp_path / "test_numbers.py").write_text(TESTS)
    monkeypatch.setattr(mutants, "ROOT", tmp_path)
    mutant = mutants.Mutant("p", "n", "b", "folovllm.numbers:half", old, new, f"test_numbers.py::{test}")
    assert mutants.outcome(mutant, 5.0 if what == "too slow" else 60.0)[0] == what
    assert (tmp_path / "folovllm/numbers.py").read_text() == MODULE
