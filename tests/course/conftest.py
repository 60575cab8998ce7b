"""Fixtures of the course's own tests. The engine is never imported in this process: mutants run in children."""

import shutil
from pathlib import Path

import pytest

from milestones.manifest import Course

HERE = Path(__file__).resolve().parent
collect_ignore = ["sample"]


@pytest.fixture
def sample(tmp_path: Path) -> Course:
    """A course of two milestones and four exercises over a package of forty lines, in a folder of its own."""
    root = tmp_path / "checkout"
    shutil.copytree(HERE / "sample", root, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(HERE.parents[1] / "folovllm" / "_overlay.py", root / "folovllm")
    return Course(root)
