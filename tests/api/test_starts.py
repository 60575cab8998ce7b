"""A start imports no more than it needs: large packages take most of its time (see the performance log)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


def there_after(*starts: str) -> dict[str, set[str]]:
    """The large packages that are there after each of these starts, in a process of its own."""
    command, root = [sys.executable, "-m", "tests.api.starts", *starts], Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return {name: set(packages) for name, *packages in map(str.split, done.stdout.splitlines())}


def test_until_there_is_a_model_neither_torch_nor_transformers() -> None:
    found = there_after("package", "parameters", "commands")
    assert found["package"] == set() and found["parameters"] | found["commands"] <= {"numpy"}


@pytest.mark.slow
def test_a_text_needs_no_transformers() -> None:
    assert there_after("text")["text"] <= {"numpy", "torch", "triton"}
