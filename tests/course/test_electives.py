"""Electives: unordered, after all milestones, without a preset; starting one touches no other."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from milestones.manifest import Course
from milestones.mine import Mine, State
from milestones.update import update
from tests.course.farm import Farm, complaint, jobs
from tests.course.test_cli import course

pytestmark = [
    pytest.mark.usefixtures("warm"),
    pytest.mark.timeout(1200),
]  # the farm has its own limits, and a job may wait its turn

TAP = Path("folovllm/tap.py")
STUBS = {id: f'raise NotImplementedError("{id}: {name}")' for id, name in (("x1.1", "drain"), ("x2.1", "twins"))}
ANSWER = "return [pool.take() for _ in range(len(pool.free))]"


@pytest.fixture
def mine(electives: Course) -> Mine:
    return Mine.of(electives)


def blanks(mine: Mine) -> list[str]:
    """The electives' exercises that are stubs in the shared file."""
    text = mine.read(TAP) or ""
    return [id for id, stub in STUBS.items() if stub in text]


def test_they_stand_behind_the_milestones(electives: Course) -> None:
    assert [m.id for m in electives.milestones] == ["m1", "m2", "x1", "x2"]
    assert [e.id for e in electives.onwards("m2")] == ["m2.1", "m2.2", "x1.1", "x2.1"]
    assert [e.id for e in electives.onwards("x1")] == ["x1.1"]
    assert electives.tests("x2") == ("-m", "x2", "tests/m1", "tests/m2", "tests/x2")
    assert electives.tests("m1") == ("-m", "m1", "tests/m1")
    assert electives.milestone("x1").flags == ("--tap",)


@pytest.mark.parametrize("order", [("x1", "x2"), ("x2", "x1")])
def test_starting_one_blanks_its_own_exercises_alone(mine: Mine, order: tuple[str, str]) -> None:
    first, second = order
    assert mine.start(first) == ["folovllm/tap.py: new, 1 to write"]
    assert blanks(mine) == [f"{first}.1"]
    assert not (mine.folder / "folovllm/pool.py").exists()
    assert "cut out" in mine.start(second)[0]
    assert blanks(mine) == ["x1.1", "x2.1"]


def test_a_file_that_is_gone_comes_back_with_the_stubs_of_what_was_started(mine: Mine) -> None:
    mine.start("x1")
    mine.start("m1")
    (mine.folder / TAP).unlink()
    mine.start("x1")
    assert blanks(mine) == ["x1.1", "x2.1"], "m1 was started, and all electives come after it"
    mine.save(State(started=["x1"]))
    (mine.folder / TAP).unlink()
    mine.start("x1")
    assert blanks(mine) == ["x1.1"]


def test_update_keeps_what_was_written_and_the_electives_that_were_not_started(mine: Mine) -> None:
    mine.start("x2")
    file = mine.folder / TAP
    file.write_text(file.read_text().replace(STUBS["x2.1"], "return 2 * things"))
    source = mine.course.root / TAP
    source.write_text(source.read_text().replace("Take all", "Take everything"))
    assert update(mine) == ["folovllm/tap.py: updated"]
    text = file.read_text()
    assert "Take everything" in text and "return 2 * things" in text and ANSWER in text


def test_no_preset_is_called_x1(mine: Mine) -> None:
    """The highest started *milestone* chooses the preset, however many electives were started."""
    script = "import folovllm.learn.overlay as o; print(o.started_milestone())"
    environment = os.environ | {"FOLOVLLM_MINE": str(mine.folder)}
    for started, preset in ((["x1"], "None"), (["m1", "x1", "x2"], "m1"), (["x2", "m2", "m1"], "m2")):
        mine.start("x1")
        mine.save(State(started=started))
        command = [sys.executable, "-c", script]
        done = subprocess.run(command, cwd=mine.course.root, env=environment, capture_output=True, text=True)
        assert done.stdout.strip() == preset, done.stderr


def test_the_way_through(electives: Course) -> None:
    assert "x1 A tap" in course(electives)
    said = course(electives, "start", "x1")
    assert "folovllm/tap.py: new, 1 to write" in said and "builds on it" not in said
    assert "x1.1 drain is not written yet" in course(electives, "test", "x1.1", status=1)
    assert "0 of 1 x1 exercises written" in course(electives, "test", status=1)
    assert "1 of 3 hints" in course(electives, "hint", "x1.1")
    course(electives, "start", "m1")
    assert "m2 builds on it: m1.1, m1.2" in course(electives, "start", "m2").replace("\n", " ")
    assert "x2 builds on it: m1.1, m1.2, m2.1, m2.2[" not in course(electives, "start", "x2")
    file = electives.root / "mine" / TAP
    file.write_text(file.read_text().replace(STUBS["x1.1"], "return list(pool.free)"))
    assert "That was the last exercise of x1" in course(electives, "test", "x1.1")
    assert "The length is asked for once" in course(electives, "explain", "x1.1")
    state = course(electives, "status")
    assert "x1 A tap" in state and "passing" in state and "x2 Twins" in state
    course(electives, "reset", "x1.1", "--yes")
    assert STUBS["x1.1"] in file.read_text()


def test_read_traces_what_an_elective_says(electives: Course) -> None:
    """In whichever thread it runs, and marks what the last milestone has not."""
    said = course(electives, "read", "x1")
    assert "opening the tap" in said
    assert "+ drain  folovllm/tap.py:6  Take all that is free.  x1.1" in said
    assert "    Pool.take  folovllm/pool.py" in said


def test_a_notebook_is_an_electives_too(electives: Course) -> None:
    from milestones import notebooks

    folder = electives.root / "notebooks" / "src"
    (folder / "x1_tap.py").write_text("# %%\n1 + 1\n")
    command = [sys.executable, "-m", "milestones.notebooks", "--check"]
    root = Path(notebooks.__file__).parents[1]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(electives.root), str(root)])}
    done = subprocess.run(command, cwd=electives.root, env=environment, capture_output=True, text=True)
    assert "notebooks/x1_tap.ipynb: was never built" in done.stderr


def test_all_milestones_pass_while_electives_are_blank(electives: Course, farm: Farm) -> None:
    found = jobs(electives)
    assert {str(job): job.blanked for job in found if job.kind == "later"} == {
        "m1-later": ("m2.1", "m2.2", "x1.1", "x2.1"),
        "m2-later": ("x1.1", "x2.1"),
    }
    farm.submit(found)
    assert {str(job): said for job in found if (said := complaint(job, farm.result(job)))} == {}


def test_notes_of_a_started_elective_are_as_any(mine: Mine) -> None:
    mine.start("x2")
    assert json.loads((mine.folder / ".course.json").read_text())["started"] == ["x2"]
