"""`update` where an exercise has moved: what a learner wrote at the old place stands at the new one afterwards."""

import json
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


def test_a_notebook_of_the_learners_imports_from_the_new_place(mine: Mine) -> None:
    notes = "from folovllm.pool import Pool\nfrom folovllm.pool import Pools\n# from folovllm.pool import Pool"
    cell = json.dumps({"cells": [{"source": notes.splitlines(keepends=True)}]}, indent=1)
    (mine.folder / "m1_pool.ipynb").write_text(cell)
    mine = to_a_new_file(mine)
    assert "m1_pool.ipynb: imports from the new place" in update(mine)
    (changed,) = json.loads((mine.folder / "m1_pool.ipynb").read_text())["cells"]
    assert "".join(changed["source"]) == "from folovllm.store import Store as Pool\n" + notes.split("\n", 1)[1]
    assert len(update(mine)) == 0


def test_nothing_leaves_a_file_before_it_is_safe_in_another(mine: Mine) -> None:
    write(mine, POOL, "    def take(self) -> int:", "    def take(self) -> int")
    before = read(mine, POOL)
    mine = to_a_new_file(mine)
    old, new = update(mine)
    assert "not updated before folovllm/store.py is" in old and "store.py: not updated, " in new
    assert read(mine, POOL) == before and not (mine.folder / STORE).exists()
    write(mine, POOL, "    def take(self) -> int", "    def take(self) -> int:")
    assert len(update(mine)) == 2 and TAKE in read(mine, STORE)


def test_an_old_place_for_each_symbol(sample: Course) -> None:
    file = sample.root / "milestones/m1_pool/milestone.toml"
    file.write_text(file.read_text().replace("difficulty = 1", 'moved_from = ["a:b", "c:d"]\ndifficulty = 1', 1))
    with pytest.raises(ValueError, match="as many places as symbols"):
        _ = sample.milestones
