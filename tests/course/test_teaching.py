"""What those who teach need: points for what was handed in, and mistakes to be found."""

import json
import os
from pathlib import Path

import pytest

from milestones.manifest import Course
from milestones.teaching import graded
from tests.course.test_cli import course, solve

pytestmark = pytest.mark.usefixtures("warm")


def test_points_are_for_what_passes(sample: Course) -> None:
    course(sample, "start", "m1")
    solve(sample)
    said = json.loads(course(sample, "grade", "m1", "--json"))
    assert (said["points"], said["of"]) == (1, 2)
    assert [(e["id"], e["state"], e["points"]) for e in said["exercises"]] == [
        ("m1.1", "passing", 1),
        ("m1.2", "not written", 0),
    ]
    file = sample.root / "mine/folovllm/pool.py"
    file.write_text(file.read_text().replace("self.free.popleft()", "self.free.pop()"))
    (failed,) = json.loads(course(sample, "grade", "m1.1", "--json"))["exercises"]
    assert failed["state"] == "failing" and failed["failed"] == "tests/m1/test_pool.py::test_take"
    assert "0 of 1 points" in course(sample, "grade", "m1.1")
    assert "hand in the whole mine/ folder" in course(sample, "grade", "m1", "--folder", "nowhere", status=2)


def test_what_is_handed_in_cannot_change_the_tests(sample: Course) -> None:
    """Only files with exercises are taken: another module of the package's, or a conftest, stays where it is."""
    course(sample, "start", "m1")
    (sample.root / "mine/conftest.py").write_text("raise SystemExit(0)")
    (sample.root / "mine/folovllm/extra.py").write_text("raise SystemExit(0)")
    (sample.root / "mine/folovllm/__init__.py").write_text("raise SystemExit(0)")
    solve(sample)
    assert json.loads(course(sample, "grade", "m1.1", "--json"))["points"] == 1


def test_a_loop_without_end_is_out_of_time(sample: Course, monkeypatch: pytest.MonkeyPatch) -> None:
    course(sample, "start", "m1")
    file = sample.root / "mine/folovllm/pool.py"
    file.write_text(file.read_text().replace('raise NotImplementedError("m1.1: Pool.take")', "while True: ..."))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(sample.root), os.environ.get("PYTHONPATH", "")]))
    (grade,) = graded(sample, sample.root / "mine", [sample.exercise("m1.1")], 0.5)
    assert (grade.state, grade.points) == ("out of time", 0)


def test_bugs(sample: Course) -> None:
    course(sample, "start", "m1")
    assert "m1.1 Take: m1.1a m1.1b" in course(sample, "bugs") and "m2.1a" in course(sample, "bugs")
    assert "nearly the answer" in course(sample, "bugs", "m1.1a", status=2)
    assert "no bug 'm1.1z'" in course(sample, "bugs", "m1.1z", status=2)
    solve(sample)
    said = course(sample, "bugs", "m1.1a")
    assert "def take(self)" in said and "self.free.pop()" in said and "--hint" in said
    assert "last in" not in said, "its name would say what is wrong"
    assert "last in" in course(sample, "bugs", "m1.1a", "--answer")
    assert "FAILED tests/m1/test_pool.py::test_take" in course(sample, "bugs", "m1.1a", "--hint")


def test_a_whole_milestone_is_pasted(sample: Course) -> None:
    course(sample, "start", "m1")
    said = course(sample, "show", "m1", "--yes", "--paste")
    assert "def take" in said and "def give" in said and said.count("pasted") == 2
    assert "2 passed" in course(sample, "test", "m1") and Path(sample.root / "mine/.backup").is_dir()
