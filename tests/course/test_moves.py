"""`update` where an exercise has moved: what a learner wrote at the old place stands at the new one afterwards."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from milestones.manifest import Course
from milestones.mine import Mine
from milestones.update import update

POOL, STORE, KERNEL = Path("folovllm/pool.py"), Path("folovllm/store.py"), Path("folovllm/kernel.py")
TAKE = "        return self.free.popleft()  # mine\n"
STUB = '        raise NotImplementedError("m1.1: Pool.take")\n'


@pytest.fixture
def mine(sample: Course) -> Mine:
    """A learner's folder in which `Pool.take` is written and the rest is not."""
    mine = Mine.of(sample)
    mine.start("m1")
    write(mine, POOL, STUB, TAKE)
    return mine


def write(mine: Mine, path: Path, old: str, new: str) -> None:
    text = (mine.folder / path).read_text()
    assert old in text
    (mine.folder / path).write_text(text.replace(old, new))


def read(mine: Mine, path: Path) -> str:
    return (mine.folder / path).read_text()


def tree_moves(mine: Mine, new: str, old: str = "folovllm.pool:Pool.take") -> Mine:
    """The manifest of m1 and the history say so, and the course is read anew."""
    file = mine.course.root / "milestones/m1_pool/milestone.toml"
    text = file.read_text()
    assert f'symbols = ["{old}"]' in text
    file.write_text(text.replace(f'symbols = ["{old}"]', f'symbols = ["{new}"]'))
    return tells(mine, f'{{ old = "{old}", new = "{new}" }}')


def tells(mine: Mine, *changes: str) -> Mine:
    """The history says so too, at its end, and the course is read anew."""
    file = mine.course.root / "milestones/renames.toml"
    before = file.read_text().splitlines()[1:-1] if file.is_file() else []
    file.write_text("\n".join(["changes = [", *before, *(f"{change}," for change in changes), "]"]))
    return Mine.of(Course(mine.course.root))


def cut(mine: Mine, path: Path, start: str, end: str) -> str:
    """Take a piece out of a file of the reference."""
    file = mine.course.root / path
    text = file.read_text()
    piece = text[text.index(start) : text.index(end)]
    file.write_text(text.replace(piece, ""))
    return piece


def to_a_new_file(mine: Mine) -> Mine:
    """`Pool.take` becomes `Store.first` in a file of its own."""
    body = cut(mine, POOL, "    def take", "    def give")
    (mine.course.root / STORE).write_text(f"class Store:\n{body.replace('def take', 'def first')}\nMORE = 1\n")
    return tree_moves(mine, "folovllm.store:Store.first")


def test_to_a_new_file_under_a_new_name(mine: Mine) -> None:
    mine = to_a_new_file(mine)
    assert update(mine) == [
        "folovllm/pool.py: updated",
        "folovllm/store.py: new, with your Store.first from folovllm/pool.py",
    ]
    assert TAKE in read(mine, STORE) and "MORE = 1" in read(mine, STORE)
    assert "def take" not in read(mine, POOL) and '"m1.2: Pool.give"' in read(mine, POOL)
    assert mine.written(mine.course.exercise("m1.1"))
    before = read(mine, STORE)
    assert update(mine) == []
    mine.start("m1")  # cuts nothing out that has come along
    assert read(mine, STORE) == before


def test_what_was_not_written_is_a_stub_at_the_new_place(mine: Mine) -> None:
    write(mine, POOL, TAKE, STUB)
    mine = to_a_new_file(mine)
    assert "folovllm/store.py: new" in update(mine)
    assert '"m1.1: Store.first"' in read(mine, STORE) and "Pool.take" not in read(mine, STORE)
    assert update(mine) == []


def test_into_a_file_that_is_there(mine: Mine) -> None:
    """With exercises and changes of its own."""
    mine.start("m2")
    (mine.folder / KERNEL).write_text("# a note of mine\n" + read(mine, KERNEL))
    body = cut(mine, POOL, "    def take", "    def give").replace("    def take", "def take")
    kernel = mine.course.root / KERNEL
    kernel.write_text(kernel.read_text() + "\n\n" + body.replace("\n    ", "\n"))
    mine = tree_moves(mine, "folovllm.kernel:take")
    assert update(mine)[0] == "folovllm/kernel.py: updated, with your take from folovllm/pool.py"
    assert "    return self.free.popleft()  # mine\n" in read(mine, KERNEL)
    assert "# a note of mine" in read(mine, KERNEL) and "m2.2" in read(mine, KERNEL)
    assert update(mine) == []


def test_a_new_name_in_the_same_file(mine: Mine) -> None:
    file = mine.course.root / POOL
    file.write_text(file.read_text().replace("def take", "def draw"))
    mine = tree_moves(mine, "folovllm.pool:Pool.draw")
    assert update(mine) == ["folovllm/pool.py: updated, with your Pool.draw from folovllm/pool.py"]
    assert TAKE in read(mine, POOL) and "def draw(self) -> int:" in read(mine, POOL)
    assert "def take" not in read(mine, POOL) and update(mine) == []


def test_a_file_that_is_no_more_goes_to_the_backup(mine: Mine) -> None:
    """And a learner who had begun the new file by `start` has a stub there, which is filled."""
    (mine.course.root / POOL).rename(mine.course.root / STORE)
    for symbol in ("take", "give"):
        mine = tree_moves(mine, f"folovllm.store:Pool.{symbol}", f"folovllm.pool:Pool.{symbol}")
    manifest = mine.course.root / "milestones/m2_share/milestone.toml"
    manifest.write_text(manifest.read_text().replace("folovllm.pool:", "folovllm.store:"))
    mine = Mine.of(Course(mine.course.root))
    mine.start("m1")
    before = read(mine, POOL)
    assert STUB in read(mine, STORE)
    gone, filled = update(mine)
    assert filled == "folovllm/store.py: updated, with your Pool.take from folovllm/pool.py"
    assert TAKE in read(mine, STORE) and not (mine.folder / POOL).exists()
    backup = Path(gone.removeprefix("folovllm/pool.py: the reference no longer has it; yours is in "))
    assert (backup / POOL).read_text() == before
    assert update(mine) == []


def test_a_notebook_of_the_learners_says_todays_names(mine: Mine) -> None:
    notes = "from folovllm.pool import Pool\nfrom folovllm.pool import Pools\n# from folovllm.pool import Pool"
    magic = "%time Pool(2)\nprint(f'{Pool(2).free}', 'Pool')"
    book = {
        "cells": [
            {"source": notes.splitlines(keepends=True)},
            {"source": magic},
            {"source": "Pool", "cell_type": "raw"},
        ]
    }
    (mine.folder / "m1_pool.ipynb").write_text(json.dumps(book, indent=1))
    mine = tells(to_a_new_file(mine), '{ old = "folovllm.pool:Pool", new = "folovllm.store:Store" }')
    assert "m1_pool.ipynb: in the names of today" in update(mine)
    changed = json.loads((mine.folder / "m1_pool.ipynb").read_text())["cells"]
    assert "".join(changed[0]["source"]) == "from folovllm.store import Store\n" + notes.split("\n", 1)[1]
    assert changed[1]["source"] == "%time Pool(2)\nprint(f'{Store(2).free}', 'Pool')"
    assert changed[2] == book["cells"][2] and update(mine) == []


def test_all_of_it_or_nothing(mine: Mine) -> None:
    """One file that is not Python: with the others updated, half of the learner's names would be yesterday's."""
    write(mine, POOL, "    def take(self) -> int:", "    def take(self) -> int")
    before = read(mine, POOL)
    mine = to_a_new_file(mine)
    assert all("not updated, expected ':'" in line for line in update(mine))
    assert read(mine, POOL) == before and not (mine.folder / STORE).exists() and mine.outdated() == [POOL]
    write(mine, POOL, "    def take(self) -> int", "    def take(self) -> int:")
    assert len(update(mine)) == 2 and TAKE in read(mine, STORE)


def test_a_file_that_moves_whole_keeps_what_was_added_to_it(mine: Mine) -> None:
    """The learner's own function and import, and remarks, in today's names."""
    write(mine, POOL, TAKE, "        return first_of(self.free)  # Pool.take takes the first\n")
    helper = "\n\ndef first_of(things):\n    return things.popleft()  # mine\n"
    (mine.folder / POOL).write_text("import heapq\n" + read(mine, POOL) + helper)
    whole = mine.course.root / POOL
    (mine.course.root / STORE).write_text(whole.read_text().replace("self.free", "self.unused"))
    whole.unlink()
    for manifest in (mine.course.root / "milestones").glob("*/milestone.toml"):
        manifest.write_text(manifest.read_text().replace("folovllm.pool:", "folovllm.store:"))
    free = '{ old = "folovllm.pool:Pool.free", new = "folovllm.pool:Pool.unused" }'
    mine = tells(mine, free, '{ old = "folovllm.pool", new = "folovllm.store" }')
    gone, new = update(mine)
    assert "the reference no longer has it" in gone and new.startswith("folovllm/store.py: new, with your Pool.take")
    assert "        return first_of(self.unused)  # Pool.take takes the first\n" in read(mine, STORE)
    assert helper in read(mine, STORE) and "import heapq\n" in read(mine, STORE) and not mine.outdated()


def test_what_a_body_had_at_hand_comes_along(mine: Mine) -> None:
    """Imports and functions of the module that it leaves: the new one need not have them."""
    used = "        return deque([leftmost(self), Empty, mine(1)])\n"
    write(mine, POOL, TAKE, used)
    (mine.folder / POOL).write_text(read(mine, POOL) + "\n\ndef mine(n):\n    return n\n")
    for file in (mine.folder / POOL, mine.folder / ".base" / POOL, mine.course.root / POOL):
        file.write_text(file.read_text() + "\n\ndef leftmost(pool):\n    return pool.free.popleft()\n")
    mine = to_a_new_file(mine)
    update(mine)
    brought = "from folovllm.pool import Empty\n        from collections import deque\n        from folovllm.pool import leftmost\n"
    assert all(line in read(mine, STORE) for line in brought.splitlines(keepends=True)), "imports go before the body"
    assert used in read(mine, STORE) and "def mine(n):\n    return n\n" in read(mine, STORE)


def test_a_new_contract_cuts_an_exercise_out_afresh(mine: Mine) -> None:
    """Once: what is written from then on is to the new question."""
    mine.save(replace(mine.state, passed=["m1"], failed=["m1.1"]))
    before, file = read(mine, POOL), mine.course.root / POOL
    file.write_text(file.read_text().replace("def take(self) -> int:", "def take(self) -> tuple[int, int]:"))
    place, says = "folovllm.pool:Pool.take", "it returns two"
    mine = tells(mine, f'{{ old = "{place}", new = "{place}", contract = "{says}" }}')
    updated, cut = update(mine)
    start = "m1.1 Pool.take is cut out afresh, for it asks something else: it returns two; yours is in "
    assert updated == "folovllm/pool.py: updated" and cut.startswith(start)
    assert (Path(cut.removeprefix(start)) / POOL).read_text() == before
    assert STUB in read(mine, POOL) and not mine.state.passed and not mine.state.failed
    write(mine, POOL, STUB, TAKE)
    assert update(mine) == [] and tells(mine, '{ old = "folovllm.a", new = "folovllm.b" }').outdated() == []
    assert update(Mine.of(Course(mine.course.root))) == [] and TAKE in read(mine, POOL)
    (mine.folder / ".course.json").unlink()
    assert update(mine) == [] and TAKE in read(mine, POOL), "who lost the notes is no older for that"


def test_a_text_that_has_changed_is_named(mine: Mine) -> None:
    """Of what is written: it is kept, and to be looked at again."""
    file = mine.course.root / POOL
    file.write_text(file.read_text().replace("The next free thing", "The first free thing"))
    assert update(mine) == ["folovllm/pool.py: updated; the text of m1.1 has changed: read it again"]
    assert TAKE in read(mine, POOL)


def test_a_history_through_several_places(mine: Mine) -> None:
    """From wherever the learner has it; a name that another thing has meanwhile does no harm to who comes from there."""
    renames = (
        '{ old = "folovllm.pool:Pool.take", new = "folovllm.pool:Pool.draw" }',
        '{ old = "folovllm.pool:Pool.draw", new = "folovllm.pool:Pool.first" }',
        '{ old = "folovllm.pool:Pool.give", new = "folovllm.pool:Pool.draw" }',
    )
    file, manifest = mine.course.root / POOL, mine.course.root / "milestones/m1_pool/milestone.toml"
    file.write_text(file.read_text().replace("def take", "def first").replace("def give", "def draw"))
    manifest.write_text(manifest.read_text().replace("Pool.take", "Pool.first").replace("Pool.give", "Pool.draw"))
    mine = tells(mine, *renames)
    (said,) = update(mine)
    assert said.startswith("folovllm/pool.py: updated, with your Pool.first from folovllm/pool.py")
    assert TAKE in read(mine, POOL) and '"m1.2: Pool.draw"' in read(mine, POOL) and update(mine) == []
    write(mine, POOL, TAKE, "        return self.draw\n")
    file.write_text(file.read_text() + "\n")
    update(mine)
    assert "return self.draw\n" in read(mine, POOL), "what was seen once is not done again"


def test_what_is_no_exercise_any_more_is_named(mine: Mine) -> None:
    file = mine.course.root / POOL
    file.write_text(file.read_text().replace("def take", "def first"))  # and no history tells
    manifest = mine.course.root / "milestones/m1_pool/milestone.toml"
    manifest.write_text(manifest.read_text().replace("Pool.take", "Pool.first"))
    updated, named = update(Mine.of(Course(mine.course.root)))
    start = "folovllm.pool:Pool.take is no exercise any more; yours is in "
    assert updated == "folovllm/pool.py: updated" and named.startswith(start)
    assert TAKE in (Path(named.removeprefix(start)) / POOL).read_text()


def test_a_reference_that_was_never_cut_out_is_not_carried(sample: Course) -> None:
    """Who started m2 alone has m1's bodies as they were; afterwards as they are."""
    mine = Mine.of(sample)
    mine.start("m2")
    file = sample.root / POOL
    file.write_text(file.read_text().replace("self.free.popleft()", "self.free.pop()"))
    assert update(mine) == ["folovllm/pool.py: updated"] and "self.free.pop()" in read(mine, POOL)


def test_a_component_of_ones_own_says_todays_names(mine: Mine) -> None:
    own = Path("folovllm/learn/builders/mine.py")
    (mine.folder / own).parent.mkdir(parents=True)
    text = "from folovllm.pool import Pool\n\n\nclass Mine(Pool):\n    def take(self): return self.free  # take\n"
    (mine.folder / own).write_text(text)
    file = mine.course.root / POOL
    file.write_text(file.read_text().replace("def take", "def first"))
    assert f"{own}: updated" in update(tree_moves(mine, "folovllm.pool:Pool.first"))
    assert (mine.folder / own).read_text() == text.replace("def take", "def first")


def test_a_component_moves_with_its_package(mine: Mine) -> None:
    old, new = Path("folovllm/parts/mine.py"), Path("folovllm/learn/parts/mine.py")
    (mine.folder / old).parent.mkdir()
    (mine.folder / old).write_text("class Mine: ...\n")
    said = update(tells(mine, '{ old = "folovllm.parts", new = "folovllm.learn.parts" }'))
    assert f"{new}: new" in said and (mine.folder / new).read_text() == "class Mine: ...\n"
    assert not (mine.folder / old).exists(), "one copy of it is left"
