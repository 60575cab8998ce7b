"""A learner's text in today's names: what is a name and what only reads like one."""

import ast

import pytest

from milestones.renames import Change, renamed, renamed_cells

MODULE = Change("folovllm.step.schedule", "folovllm.step.record")
CLASS = Change("folovllm.step.record:Share", "folovllm.step.record:Scheduled")
FIELD = Change("folovllm.step.record:Scheduled.draw", "folovllm.step.record:Scheduled.sampling")
METHOD = Change("folovllm.cache.manager:Manager.reserve", "folovllm.cache.manager:Manager.allocate")
NEED = Change("folovllm.cache.manager:Manager.allocate(need)", "folovllm.cache.manager:Manager.allocate(count)")
FUNCTION = Change("folovllm.engine.pick:chunk", "folovllm.engine.budget:take")
ALL = [MODULE, CLASS, FIELD, METHOD, NEED, FUNCTION]
IMPORTED = "from folovllm.engine.pick import chunk"

TEXTS = {
    "a member, in what looks like it": (
        "x.draw(share.draw)  # share.draw\n'draw', draw, draws, share.drawn",
        "x.sampling(share.sampling)  # share.draw\n'draw', draw, draws, share.drawn",
    ),
    "in an f-string": (
        'f"draw é {share.draw:>{s.draw}} {{draw}}"',
        'f"draw é {share.sampling:>{s.sampling}} {{draw}}"',
    ),
    "in one of several lines": ('f"""draw\n  {share.draw}"""', 'f"""draw\n  {share.sampling}"""'),
    "not of a stranger": ("import re\nre.draw(1)", "import re\nre.draw(1)"),
    "a keyword of its class": ("Scheduled(draw=1), f(draw=1)", "Scheduled(sampling=1), f(draw=1)"),
    "a module": (
        "import folovllm.step.schedule\nfolovllm.step.schedule.Share",
        "import folovllm.step.record\nfolovllm.step.record.Scheduled",
    ),
    "a module by another name": (
        "from folovllm.step import schedule as s\ns.Share, s.other",
        "from folovllm.step import record as s\ns.Scheduled, s.other",
    ),
    "a module in words": (
        "'folovllm.step.schedule.X'  # folovllm.step.schedule, folovllm.step.schedules",
        "'folovllm.step.record.X'  # folovllm.step.record, folovllm.step.schedules",
    ),
    "a class": (
        "from folovllm.step.schedule import Share, Plan  # two\nShare",
        "from folovllm.step.record import Scheduled, Plan  # two\nScheduled",
    ),
    "a class of the same name": ("from elsewhere import Share\nShare", "from elsewhere import Share\nShare"),
    "an import that parts": (
        "from folovllm.engine.pick import (chunk, other as o)\nchunk(o)",
        "from folovllm.engine.budget import take\nfrom folovllm.engine.pick import other as o\ntake(o)",
    ),
    "an import by another name": (f"{IMPORTED} as c\nc()", "from folovllm.engine.budget import take as c\nc()"),
    "a local of the old name": (f"{IMPORTED}\ndef f(chunk): return chunk", None),
    "one of a comprehension": (f"{IMPORTED}\nchunk([chunk for chunk in x])", "take([take for take in x])"),
    "a local of the new name": (f"{IMPORTED}\ndef f():\n    take = 1\n    return chunk(take)", "return take(take_)"),
    "a parameter": (
        "class M:\n    def reserve(self, need): return need",
        "    def allocate(self, count): return count",
    ),
    "a parameter, where a local is called so": (
        "def reserve(need):\n    count = need\n    return count",
        "",
    ),
    "a keyword": ("kv.reserve(1, need=need)", "kv.allocate(1, count=need)"),
}


@pytest.mark.parametrize(("text", "now"), TEXTS.values(), ids=TEXTS)
def test_names(text: str, now: str | None) -> None:
    found = renamed(text, ALL, ["m2.2"])
    if now is None:
        now = text.replace(IMPORTED, "from folovllm.engine.budget import take")
    assert now in found and ast.parse(found)
    assert renamed(found, ALL, ["m2.2"]) == found


def test_names_in_cells() -> None:
    """What IPython alone understands stays, as does a cell that nobody does; an import counts from its cell on."""
    cells = [IMPORTED, "%time kv.reserve()\nkv.reserve()\n!ls", "kv.reserve(", "chunk()"]
    now = ["from folovllm.engine.budget import take", "%time kv.reserve()\nkv.allocate()\n!ls", "kv.reserve(", "take()"]
    assert renamed_cells(cells, ALL, ["m2.2"]) == now


@pytest.mark.parametrize(
    ("change", "ids", "is_renamed"),
    [
        ({"only": ("m2.2",)}, "m2.2", True),
        ({"only": ("m2.2",)}, "m2.20", False),
        ({"only": ("m2",)}, "m2.20", True),
        ({"on": ("kv", "pool")}, "m1.1", True),
        ({"on": ("plan",)}, "m1.1", False),
    ],
)
def test_where_a_name_means_that(change: dict[str, tuple[str, ...]], ids: str, is_renamed: bool) -> None:
    """`reserve` may mean several things: the history says in whose bodies, or on what."""
    found = renamed("self.kv.reserve()", [Change(METHOD.old, METHOD.new, **change)], [ids])
    assert found == ("self.kv.allocate()" if is_renamed else "self.kv.reserve()")
