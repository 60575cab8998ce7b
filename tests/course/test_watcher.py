"""What a learner's mistake does to the cache is seen: with every wrong answer behind it, the watcher has the manager's own blocks."""

import importlib
from dataclasses import replace
from functools import reduce

import pytest

from milestones.manifest import Course
from milestones.tasks import WrongAnswer
from tests.m5.test_events import World, cells_of, engine

COURSE = Course.here()
MILESTONES = {
    "m2.1": "m3",
    "m2.2": "m3",
    "m2.3": "m3",
    "m2.4": "m2",
    "m3.2": "m3",
    "m3.3": "m3",
    "m3.4": "m5",
    "m3.6": "m3",
}
MILESTONES |= {"m5.1": "m5", "m5.3": "m5", "m5.4": "m5", "m5.5": "m5"}
TWICE_FREE = ("m3.4_shared_blocks",)  # a block that joins the free list twice tears it: no link says what is free
UNSEEN = ("m5.4_forgets_the_holder",)  # it sets a count of holders of which no event tells
ANSWERS = [w for e in COURSE.exercises if e.id in MILESTONES for w in COURSE.wrong_answers(e) if w.id not in UNSEEN]


def put_in(answer: WrongAnswer, patch: pytest.MonkeyPatch) -> None:
    """Replace the exercise's symbols that the answer defines, wherever the engine has them."""
    for symbol in answer.exercise.symbols:
        module = importlib.import_module(symbol.module)
        exec(answer.source, namespace := dict(vars(module)))
        *owner, name = symbol.name.split(".")
        wrong = namespace.get(owner[0] if owner else name)
        if owner and (wrong is getattr(module, owner[0]) or name not in vars(wrong)):
            continue  # it defines another symbol of the exercise
        patch.setattr(reduce(getattr, owner, module), name, getattr(wrong, name) if owner else wrong)
        if not owner:
            patch.setattr(f"folovllm.engine.build_batch.{name}", wrong, raising=False)


@pytest.mark.parametrize("answer", ANSWERS, ids=lambda answer: answer.id)
def test_the_watcher_shows_what_it_did(answer: WrongAnswer, monkeypatch: pytest.MonkeyPatch) -> None:
    put_in(answer, monkeypatch)
    world = World(engine(MILESTONES[answer.exercise.id]), 0)
    kv = world.engine.scheduler.kv  # type: ignore[attr-defined]
    monkeypatch.setattr(world, "compare", lambda: None)
    for _ in range(100):
        try:
            world.turn()
        except Exception:  # wrong code may raise what it likes: the blocks are compared all the same
            world.engine.events.drain()
        cells = cells_of(kv)
        if answer.id in TWICE_FREE:
            cells = [replace(own, is_free=seen.is_free) for own, seen in zip(cells, world.watcher.cells, strict=True)]
        assert world.watcher.cells == cells
