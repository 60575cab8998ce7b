"""The moves of this course's own exercises: a folder from before them, and what `update` makes of it."""

import json
import re
from pathlib import Path

from milestones import splice
from milestones.manifest import Course
from milestones.mine import Mine, State
from milestones.tasks import Symbol
from milestones.update import update

COURSE = Course(Path(__file__).resolve().parents[2])
BEFORE = {
    "folovllm/worker/packed_step.py": '''"""A whole step in one int32 buffer."""

import numpy as np


class StepPacker:
    def __init__(self, num_rows: int, buckets: list[int]) -> None:
        self._padding_row = num_rows
        self._buckets = buckets

    def pack_decode(self, items: list[ScheduledSequence], width: int) -> PackedStep:
        """A step in which every sequence has one new token, padded to `width` columns."""
        raise NotImplementedError("m6.3: StepPacker.pack_decode")

    def _row_fields(self, rows: list[int]) -> Int32:
        """TEMPERATURE, SEED_LOW and SEED_HIGH of the rows, [3, S]."""
        return np.stack([self._temperature[rows]])


def choose_bucket(num_seqs: int, buckets: list[int]) -> int:
    """The smallest width of `buckets` (ascending) that holds `num_seqs` sequences; 0 if there is none."""
    raise NotImplementedError("m6.1: choose_bucket")
''',
    "folovllm/distributed/sharded_runner.py": '''"""A `GraphRunner` on each of several devices."""

import torch

NOWHERE = 2**31 - 1


def best_of_ranks(scores: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The winner among the ranks' best tokens, row by row; of equal scores the one with the lowest id."""
    raise NotImplementedError("m6.9: best_of_ranks")
''',
    "folovllm/distributed/layers.py": '''"""Layers of which every rank has a part."""


class ShardedEmbedding(Embedding):
    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Rows of the embedding, [T] -> [T, H]."""
        raise NotImplementedError("m6.8: ShardedEmbedding.forward")
''',
    "folovllm/engine/scheduler.py": '''"""Who is served in the next step, and by how many tokens."""


class Scheduler:
    def schedule(self) -> SchedulerOutput:
        """Decide the next step, with `_reserve(seq, n, rest, output)`."""
        raise NotImplementedError("m2.2: Scheduler.schedule")

    def postprocess(self, output: SchedulerOutput, token_ids: Iterable[int]) -> list[Sequence]:
        """Take in the tokens that a step drew, one for each scheduled sequence, in order."""
        raise NotImplementedError("m2.3: Scheduler.postprocess")


def chunk(seq: Sequence, budget: int, threshold: int = 0) -> int:
    """As many uncomputed tokens of `seq` as the budget has left, and no more than `threshold` if that is not 0.

    So a long prompt is computed over several steps, beside the decodes of others (chunked prefill; Sarathi-Serve,
    Agrawal et al., OSDI 2024). An empty budget leaves 0: not in this step.
    """
    raise NotImplementedError("m5.5: chunk")


def preempt(scheduler: Scheduler, candidates: list[Sequence]) -> Sequence | None:
    """No room: the candidate that ranks last goes back to `waiting` and gives up its cache."""
    raise NotImplementedError("m3.6: preempt")
''',
}
"""Files that exercises were in before a step was a value, with their neighbours, as `start` made them."""


def learner(folder: Path, *written: str) -> Mine:
    """A folder from then, in which these exercises are written: `return "m6.1, mine"`."""
    mine = Mine(COURSE, folder)
    for name, text in BEFORE.items():
        mine.write(Path(name), text, base=text)
        for id in written:
            text = re.sub(rf'raise NotImplementedError\("{id}: [\w.]+"\)', f'return "{id}, mine"', text)
        mine.write(Path(name), text)
    mine.save(State(started=["m2", "m3", "m5", "m6"]))
    return mine


def body(mine: Mine, symbol: Symbol) -> str:
    return splice.find(mine.read(symbol.path) or "", symbol.name).body_at("").strip()


def test_what_was_written_is_carried_over_and_what_was_not_is_a_stub(tmp_path: Path) -> None:
    written = ("m2.2", "m5.5", "m6.1", "m6.8", "m6.9")
    mine = learner(tmp_path, *written)
    said = {line.partition(":")[0]: line for line in update(mine)}
    for exercise in (COURSE.exercise(id) for id in (*written, "m2.3", "m3.6", "m6.3")):
        for symbol in (s for s in exercise.symbols if mine.read(s.path) is not None):  # m6.1 has others now, too
            is_mine = body(mine, symbol) == f'return "{exercise.id}, mine"'
            assert is_mine is (exercise.id in written) and mine.is_blank(symbol, exercise) is not is_mine
    for old in ("folovllm/worker/packed_step.py", "folovllm/distributed/sharded_runner.py"):
        assert not (tmp_path / old).exists() and ".backup" in said[old]
    assert update(mine) == []
    mine.start("m6")  # cuts nothing out that has come along
    assert body(mine, COURSE.exercise("m6.1").symbols[0]) == 'return "m6.1, mine"'


def test_update_says_which_texts_have_changed(tmp_path: Path) -> None:
    """Of what is written: a solution is kept and to be looked at again, but that of an old contract goes to the backup."""
    mine = learner(tmp_path, "m2.2", "m2.3", "m5.5", "m6.1", "m6.3")
    said = {line.partition(":")[0]: line for line in update(mine)}
    scheduler, packed = said["folovllm/engine/scheduler.py"], said["folovllm/step/packed.py"]
    assert scheduler.endswith("updated; the text of m2.2, m2.3 has changed: read it again")
    assert packed == "folovllm/step/packed.py: new, with your choose_bucket from folovllm/worker/packed_step.py"
    assert (
        "it packs the shares of a step, not sequences"
        in said["m6.3 StepPacker.pack_decode is cut out afresh, for it asks something else"]
    )


def test_a_notebook_imports_from_the_new_places(tmp_path: Path) -> None:
    mine = learner(tmp_path, "m6.1")
    lines = [
        "from folovllm.worker.packed_step import choose_bucket\n",
        "from folovllm.worker.packed_step import StepPacker",
    ]
    notes = tmp_path / "m6_speed_and_scale.ipynb"
    notes.write_text(json.dumps({"cells": [{"source": lines}]}, indent=1))
    update(mine)
    (cell,) = json.loads(notes.read_text())["cells"]
    assert cell["source"] == [line.replace("folovllm.worker.packed_step", "folovllm.step.packed") for line in lines]


def test_an_exercise_that_is_part_of_another_goes_by_its_old_number(tmp_path: Path) -> None:
    """m5.2 is in m5.1: a stub that says m5.2 is unwritten, and a command that says m5.2 means m5.1."""
    mine, exercise = Mine(COURSE, tmp_path), COURSE.exercise("m5.2")
    assert exercise is COURSE.exercise("m5.1") and "m5.2" not in {e.id for e in COURSE.exercises}
    mine.start("m5")
    file = tmp_path / exercise.symbols[1].path
    old = file.read_text().replace(
        '"m5.1: PrefixCache.longest_cached_prefix"', '"m5.2: PrefixCache.longest_cached_prefix"'
    )
    file.write_text(old.replace('raise NotImplementedError("m5.1: compute_hash")', "return 1"))
    assert mine.blanks(exercise) == ["PrefixCache.longest_cached_prefix"] and not mine.written(exercise)
    mine.start("m5")
    assert '"m5.2: PrefixCache.longest_cached_prefix"' in file.read_text() and "return 1" in file.read_text()
    mine.paste(exercise)
    assert mine.written(exercise)
