"""Fixtures of the course's own tests. The engine is never imported in this process: mutants run in children."""

import inspect
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from milestones.manifest import Course
from tests.course.farm import Farm, Job

HERE = Path(__file__).resolve().parent
collect_ignore = ["sample", "electives"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that wait for mutants come last, those of the real course before the sample's: the farm begins with them."""

    def turn(item: pytest.Item) -> int:
        if "farm" not in inspect.signature(getattr(item, "function", lambda: None)).parameters:
            return 0
        return 1 if _job(item) else 2

    items.sort(key=turn)


@pytest.fixture
def sample(tmp_path: Path) -> Course:
    """A course of two milestones and four exercises over a package of forty lines, in a folder of its own."""
    root = tmp_path / "checkout"
    shutil.copytree(HERE / "sample", root, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("__init__.py", "overlay.py"):
        (root / "folovllm/learn").mkdir(exist_ok=True)
        shutil.copy(HERE.parents[1] / "folovllm/learn" / name, root / "folovllm/learn")
    return Course(root)


@pytest.fixture
def electives(sample: Course) -> Course:
    """The sample with two electives, whose exercises share a file."""
    shutil.copytree(HERE / "electives", sample.root, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    project = sample.root / "pyproject.toml"
    project.write_text(project.read_text().replace('"m2: two"', '"m2: two", "x1: tap", "x2: twins"'))
    return Course(sample.root)


@pytest.fixture(scope="session", autouse=True)
def farm(request: pytest.FixtureRequest) -> Iterator[Farm]:
    """Mutants of all selected tests, begun before the first test of any kind, so that no core waits for one to ask."""
    with Farm() as farm:
        if "PYTEST_XDIST_WORKER" not in os.environ:  # where each process would begin them all
            farm.submit(filter(None, map(_job, request.session.items)))
        yield farm


def _job(item: pytest.Item) -> Job | None:
    """The mutant of the real course that a test asks for."""
    callspec = getattr(item, "callspec", None)
    job = callspec and callspec.params.get("job")
    return job if isinstance(job, Job) else None
