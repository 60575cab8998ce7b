"""`start`, `start` again, `reset` and `update` never lose an edit (and cut out exactly what is to be written)."""

import json
from pathlib import Path

import pytest

from milestones.manifest import Course
from milestones.mine import Mine
from milestones.update import update

POOL = Path("folovllm/pool.py")
TAKE = "        return self.free.popleft()  # mine\n"


@pytest.fixture
def mine(sample: Course) -> Mine:
    return Mine.of(sample)


def text(mine: Mine, path: Path = POOL) -> str:
    return (mine.folder / path).read_text()


def edit(mine: Mine, old: str, new: str) -> str:
    assert old in text(mine)
    (mine.folder / POOL).write_text(text(mine).replace(old, new))
    return text(mine)


def stub(id: str, name: str) -> str:
    return f'        raise NotImplementedError("{id}: Pool.{name}")\n'


def written(mine: Mine) -> str:
    return " ".join(e.id for e in mine.course.exercises if mine.written(e))


def test_start_cuts_out_this_milestone_and_the_later_ones(mine: Mine) -> None:
    assert mine.start("m1") == ["folovllm/pool.py: new, 2 to write, 1 more for later milestones"]
    assert all(stub(*s) in text(mine) for s in (("m1.1", "take"), ("m1.2", "give"), ("m2.1", "share")))
    assert not (mine.folder / "folovllm/kernel.py").exists()
    assert "class Empty" in text(mine) and '"""Return a thing."""' in text(mine)
    assert (mine.state.started, mine.state.hints) == (["m1"], {})


def test_starting_again_touches_nothing(mine: Mine) -> None:
    mine.start("m1")
    edit(mine, stub("m1.1", "take"), TAKE)
    # An answer equal to the reference's, letter by letter, is the learner's all the same.
    before = edit(mine, stub("m1.2", "give"), "        self.free.append(thing)\n")
    for id in ("m1", "m2", "m1"):
        said = mine.start(id)
        assert text(mine) == before
        left = "left as it is, to write: Pool.share" if id == "m2" else "left as it is"
        assert f"folovllm/pool.py: there already, {left}" in said
    assert (mine.folder / "folovllm/kernel.py").is_file()


def test_an_earlier_milestone_started_later(mine: Mine) -> None:
    mine.start("m2")
    assert "return self.free.popleft()" in text(mine)
    edit(mine, "self.free.append(thing)", "self.free.append(thing)  # looked into it")
    edit(mine, stub("m2.1", "share"), "        return [[]]\n")
    assert mine.start("m1") == ["folovllm/pool.py: there already, Pool.take cut out"]
    assert stub("m1.1", "take") in text(mine)
    assert "# looked into it" in text(mine) and "return [[]]" in text(mine)


def test_a_file_that_is_gone_comes_back_blank(mine: Mine) -> None:
    """Also by the start of another milestone, and nothing else is touched."""
    mine.start("m1")
    mine.start("m2")
    kernel = mine.folder / "folovllm/kernel.py"
    kernel.write_text(kernel.read_text() + "# mine\n")
    before = kernel.read_bytes()
    for id, said in (("m1", "new, 2 to write, 1 more for later milestones"), ("m2", "new, 3 to write")):
        mine.paste(mine.course.exercise("m1.1"))
        (mine.folder / POOL).unlink()
        assert written(mine) == ""
        assert f"folovllm/pool.py: {said}" in mine.start(id)
        assert all(stub(*s) in text(mine) for s in (("m1.1", "take"), ("m1.2", "give"), ("m2.1", "share")))
        assert written(mine) == "" and kernel.read_bytes() == before


def test_reset_takes_one_exercise_and_keeps_a_copy(mine: Mine) -> None:
    mine.start("m1")
    edit(mine, stub("m1.1", "take"), TAKE)
    before = edit(mine, stub("m1.2", "give"), "        self.free.extend([thing])\n")
    backup = mine.reset(mine.course.exercise("m1.1"))
    assert (backup / POOL).read_text() == before
    assert stub("m1.1", "take") in text(mine) and "extend([thing])" in text(mine)
    edit(mine, "    def take(self) -> int:", "    def take(self, oops")
    with pytest.raises(ValueError, match=r"pool.py: .*Mend that first"):
        mine.reset(mine.course.exercise("m1.2"))
    with pytest.raises(ValueError, match="start m2 first"):
        mine.reset(mine.course.exercise("m2.2"))


def test_pasting_every_answer_gives_the_reference(mine: Mine) -> None:
    mine.start("m1")
    mine.start("m2")
    for n, exercise in enumerate(mine.course.exercises):
        assert len(written(mine).split()) == n
        mine.paste(exercise)
    for path in (POOL, Path("folovllm/kernel.py")):
        assert text(mine, path) == mine.course.source(path)


def change_reference(mine: Mine, *pairs: tuple[str, str]) -> None:
    source = mine.course.source(POOL)
    for old, new in pairs:
        assert old in source
        source = source.replace(old, new)
    (mine.course.root / POOL).write_text(source)


def test_update_grafts_bodies_into_the_fresh_reference(mine: Mine) -> None:
    mine.start("m1")
    edit(mine, stub("m1.1", "take"), TAKE)
    assert update(mine) == []
    change_reference(
        mine,
        ('"""Hands out', '"""Gives out'),
        ("# first in, first out", "# better"),
        ("(self) -> int", "(self) -> object"),
    )
    assert update(mine) == ["folovllm/pool.py: updated"]
    assert TAKE in text(mine) and "Gives out" in text(mine) and "-> object" in text(mine)
    assert stub("m1.2", "give") in text(mine) and stub("m2.1", "share") in text(mine)
    assert update(mine) == []


def test_update_keeps_what_was_added_outside_the_bodies(mine: Mine) -> None:
    mine.start("m1")
    edit(mine, stub("m1.1", "take"), TAKE)
    edit(mine, "from collections import deque", "import heapq\nfrom collections import deque")
    (mine.folder / POOL).write_text(text(mine) + "\n\ndef my_helper():\n    return heapq\n")
    change_reference(mine, ("Nothing left.", "Nothing is left."))
    assert update(mine) == ["folovllm/pool.py: updated"]
    assert all(t in text(mine) for t in ("import heapq\n", "def my_helper", TAKE, "Nothing is left."))


def test_update_steps_back_from_a_conflict(mine: Mine) -> None:
    mine.start("m1")
    edit(mine, stub("m1.1", "take"), TAKE)
    before = edit(mine, "Nothing left.", "Nothing there.")
    change_reference(mine, ("Nothing left.", "Nothing is left."))
    (note,) = update(mine)
    assert "not updated" in note and text(mine) == before
    beside = (mine.folder / "folovllm/pool.py.new").read_text()
    assert "Nothing is left." in beside and TAKE in beside


def test_update_leaves_a_file_that_does_not_parse(mine: Mine) -> None:
    mine.start("m1")
    before = edit(mine, "    def take(self) -> int:", "    def take(self) -> int")
    change_reference(mine, ("Nothing left.", "Nothing is left."))
    (note,) = update(mine)
    assert "not updated" in note and text(mine) == before


def test_the_notebook_comes_along_without_its_answers(mine: Mine) -> None:
    cell = {"cell_type": "code", "source": "1+1", "outputs": [{"text": "2"}], "execution_count": 1, "metadata": {}}
    book = mine.course.root / "notebooks" / "m1_pool.ipynb"
    book.parent.mkdir(exist_ok=True)
    book.write_text(json.dumps({"cells": [cell], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}))
    mine.start("m1")
    copy = mine.folder / "m1_pool.ipynb"
    assert json.loads(copy.read_text())["cells"][0] == cell | {"outputs": [], "execution_count": None}
    copy.write_text("notes")
    mine.start("m1")
    assert copy.read_text() == "notes"


def test_an_exercise_that_is_part_of_another_goes_by_its_old_number(tmp_path: Path) -> None:
    """m5.2 is in m5.1: a stub that says m5.2 is unwritten, and a command that says m5.2 means m5.1."""
    course = Course(Path(__file__).resolve().parents[2])
    mine, exercise = Mine(course, tmp_path), course.exercise("m5.2")
    assert exercise is course.exercise("m5.1") and "m5.2" not in {e.id for e in course.exercises}
    mine.start("m5")
    path, found = exercise.symbols[1].path, '"m5.1: PrefixCache.longest_cached_prefix"'
    old = text(mine, path).replace(found, found.replace("m5.1", "m5.2"))
    (mine.folder / path).write_text(old.replace('raise NotImplementedError("m5.1: compute_hash")', "return 1"))
    assert mine.blanks(exercise) == ["PrefixCache.longest_cached_prefix"] and not mine.written(exercise)
    mine.start("m5")
    assert '"m5.2: PrefixCache.longest_cached_prefix"' in text(mine, path) and "return 1" in text(mine, path)
    mine.paste(exercise)
    assert mine.written(exercise)
