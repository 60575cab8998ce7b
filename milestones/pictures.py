"""Pictures of the running example, as SVG: who takes part in which step, and where each token goes.

They are drawn from what the engine did (`milestones.running_example.play`), in the book as in a notebook's cell:

    from milestones.pictures import blocks, lanes, step
    run = play("m3")
    lanes(run)          # a row a request, a column a step
    blocks(run)         # a row a block
    step(run, 4)        # tokens -> block table -> slot mapping -> memory, before and after
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from itertools import groupby

from milestones.running_example import Place, Run, ScheduledSequence, State, Turn, example

DARK = {"A": "#a85f00", "B": "#0072b2", "C": "#007a5a"}  # as in the inspector: orange, blue, green
LIGHT = {"A": "#fae3bd", "B": "#d6ebf8", "C": "#d2ece3"}
INK, GREY, RED = "#222", "#767676", "#b00020"
WIDTH = 830  # pixels, of every picture
LINE, WIDEST = 24, 48  # of a row in `lanes`, and of a step
SLOT = 4.6  # how high a slot is in `blocks`
CELL, HIGH, ACROSS = 51, 19, 4  # of a slot in `memory`, and how many stand side by side
WANT = {
    "sequences": "the only place is taken",
    "tokens": "the step's budget of tokens is spent",
    "blocks": "no room in the cache",
    "preemption": "another has just given way",
}


class Picture(str):
    """An SVG; a notebook shows it."""

    def __repr__(self) -> str:
        return f"<a picture, {len(self)} bytes of SVG>"

    def _repr_svg_(self) -> str:
        return str(self)


def lanes(*runs: Run | tuple[str, Run]) -> Picture:
    """Who takes part in which step: a row a request, a column a step, a number the tokens that are computed.

    Several runs stand under one another, on one clock. Dark: several tokens of a prompt (or again, after a preemption); light:
    one token; dashed: waits; red: gives way.
    """
    titled, wide = _titled(runs)
    high, parts = 3 * LINE + 64, list[str]()
    for number, (title, run) in enumerate(titled):
        parts += _lanes(run, f"{title}: {len(run.turns)} steps", high * number, wide)
    return svg(parts, high * len(runs) - 8)


def _titled(runs: Iterable[Run | tuple[str, Run]]) -> tuple[list[tuple[str, Run]], int]:
    """Each run with its title, and how wide a step of theirs is."""
    titled = [each if isinstance(each, tuple) else (each.milestone.upper(), each) for each in runs]
    return titled, min(WIDEST, (WIDTH - 46) // max(len(run.turns) for _, run in titled))


def _lanes(run: Run, title: str, top: int, wide: int) -> Iterable[str]:
    yield text(8, top + 18, title, size=14, bold=True)
    for turn in run.turns:
        yield text(40 + wide * (turn.number + 0.5), top + 36, turn.number, size=10, fill=GREY, at="middle")
    for row, request in enumerate(example().requests):
        y = top + 42 + LINE * row
        yield text(14, y + 16, request.name, fill=DARK[request.name], bold=True)
        for doing, cells in groupby(run.turns, key=lambda turn: _doing(turn, request.name)):
            yield from _stretch(doing, request.name, list(cells), y, wide)


def _doing(turn: Turn, name: str) -> str:
    """What a request does in a step: "share 0", "share 1" (a number of its own for each), "gives way", "waits", or nothing."""
    if any(scheduled.name == name for scheduled in turn.scheduled_seqs):
        return f"share {turn.number}"
    if name in turn.preempted:
        return "gives way"
    return "waits" if name in turn.before.waiting + turn.outside else ""


def _stretch(doing: str, name: str, turns: list[Turn], y: float, wide: int) -> Iterable[str]:
    x, width = 40 + wide * turns[0].number, wide * len(turns)
    if doing == "waits":
        yield box(x + 2, y + 2, width - 4, LINE - 4, "white", GREY, dashed=True)
        if len(turns) > 1:
            yield text(x + width / 2, y + 16, "waits", size=10, fill=GREY, at="middle")
    elif doing == "gives way":
        yield box(x + 2, y + 2, width - 4, LINE - 4, "white", RED)
        yield text(x + width / 2, y + 16, "out", size=10, fill=RED, at="middle")
    elif doing:
        scheduled = next(scheduled for scheduled in turns[0].scheduled_seqs if scheduled.name == name)
        tokens, found = scheduled.end - scheduled.start, turns[0].hits.get(name, 0)
        is_dark = tokens > 1 or not scheduled.draws
        yield box(x + 1, y + 1, width - 2, LINE - 2, (DARK if is_dark else LIGHT)[name], DARK[name])
        label = f"{found}+{tokens}" if found else tokens
        yield text(x + width / 2, y + 16, label, size=11, fill="white" if is_dark else INK, at="middle")


def blocks(*runs: Run | tuple[str, Run]) -> Picture:
    """Who holds which block: a row a block, as high as it is long, a column a step. What is not filled is reserved and empty."""
    titled, wide = _titled(runs)
    top, parts = 0.0, list[str]()
    for title, run in titled:
        parts += [text(8, top + 18, title, size=14, bold=True), *_holders(run, top + 26, wide)]
        top += 46 + SLOT * len(run.turns[0].after.memory)
    return svg(parts, top - 8)


def _holders(run: Run, top: float, wide: int) -> Iterable[str]:
    high = SLOT * run.block_size
    for turn in run.turns:
        x = 40 + wide * turn.number
        yield text(x + wide / 2, top + 10, turn.number, size=10, fill=GREY, at="middle")
        for block in range(len(turn.after.held)):
            yield box(x + 1, top + 14 + high * block, wide - 2, high - 1, "white", "#ddd")
        held = _filled(run, turn)
        for (block, name), tokens in held.items():
            sharers = [other for taken, other in held if taken == block]
            part = high / len(sharers)
            y = top + 14 + high * block + part * sharers.index(name)
            yield box(x + 1, y, (wide - 2) * tokens / run.block_size, part - 1, LIGHT[name], "none")
            yield box(x + 1, y, wide - 2, part - 1, "none", DARK[name])
            yield text(x + wide / 2, y + part / 2 + 4, name, size=10, fill=DARK[name], at="middle", bold=True)
    for block in range(len(run.turns[0].after.held)):
        yield text(34, top + 18 + high * (block + 0.5), block, size=10, fill=GREY, at="end")


def _filled(run: Run, turn: Turn) -> dict[tuple[int, str], int]:
    """Of each block and each request that holds it in a step, how many of its tokens lie there."""
    size = run.block_size
    return {
        (block, scheduled.name): min(size, scheduled.end - i * size)
        for scheduled in turn.scheduled_seqs
        for i, block in enumerate(_table(turn, scheduled.name, scheduled, size))
    }


def step(run: Run, number: int) -> Picture:
    """One step: the tokens of each request, its block table, the slots of the new tokens, and the memory before and after."""
    turn = run.turns[number]
    shares, story = {scheduled.name: scheduled for scheduled in turn.scheduled_seqs}, _story(run, turn)
    parts = [text(8, 20, f"{run.milestone.upper()}, step {number}", size=14, bold=True)]
    parts += [text(8, 38 + 15 * i, line, size=11) for i, line in enumerate(story)]
    top = 52 + 15 * len(story)
    for name in sorted({*turn.after.tables, *turn.before.tables, *shares, *turn.refused}):
        parts += _request(run, turn, name, shares.get(name), top)
        top += 78
    new = {slot for scheduled in shares.values() for slot in scheduled.slots}
    left, slots = WIDTH - 2 * (ACROSS * CELL + 40), len(turn.after.memory)
    parts += _memory(run, turn.before, left, "memory before", set())
    parts += _memory(run, turn.after, left + ACROSS * CELL + 40, "memory after", new)
    return svg(parts, max(top, 34 + HIGH * (slots // ACROSS) + 4 * (slots // max(run.block_size, 1))))


def _story(run: Run, turn: Turn) -> list[str]:
    """What else happened, in sentences."""
    said = [f"{name} arrives." for name in turn.arrived]
    said += [f"{name} begins with {hit} tokens that are in the cache." for name, hit in turn.hits.items()]
    for name, of in turn.preempted.items():
        to = f" to {of}" if of != name else ""
        said.append(f"{name} gives way{to}, and loses {turn.lost[name]} computed tokens.")
    said += [f"{name} waits: {WANT[why]}." for name, why in turn.refused.items() if name not in turn.preempted]
    if turn.drawn:
        drawn = (f"{name} “{run.texts[token].strip()}”" for name, token in turn.drawn.items())
        said.append(f"Sampled: {', '.join(drawn)}.")
    return said + [f"{name} is done." for name in turn.finished]


def _request(run: Run, turn: Turn, name: str, scheduled: ScheduledSequence | None, top: float) -> Iterable[str]:
    """Positions of a request's tokens in groups of a block, the table below them, and the new tokens' slots."""
    yield text(8, top + 14, name, fill=DARK[name], bold=True)
    if not scheduled:
        yield text(30, top + 14, "takes no part in this step", size=11, fill=GREY)
        return
    size, wide, group = run.block_size, 16, run.block_size * 16 + 6
    for p in range(scheduled.end):
        x, is_new = 30 + group * (p // size) + wide * (p % size), p >= scheduled.start
        yield box(x, top, wide - 1, 18, (DARK if is_new else LIGHT)[name], DARK[name])
        yield text(x + wide / 2, top + 13, p, size=8.5, fill="white" if is_new else INK, at="middle")
    for i, block in enumerate(_table(turn, name, scheduled, size)):
        wide_here = wide * min(size, scheduled.end - i * size)
        yield text(30 + group * i + max(wide_here, 52) / 2 - 2, top + 34, f"↓ block {block}", size=10, at="middle")
    if scheduled.slots:
        yield text(30, top + 52, f"slot mapping of the new: {_ranges(scheduled.slots)}", size=10, fill=INK)


def _table(turn: Turn, name: str, scheduled: ScheduledSequence, size: int) -> tuple[int, ...]:
    """The block table of a request in a step; if it ended in the step, as far as the slots say."""
    if name in turn.after.tables:
        return turn.after.tables[name]
    known = turn.before.tables.get(name, ())
    named = dict.fromkeys(slot // size for slot in scheduled.slots)
    return known + tuple(block for block in named if block not in known)


def _memory(run: Run, state: State, left: float, title: str, new: set[int]) -> Iterable[str]:
    """Each block in lines of four slots. A grey number: the block is free, and has its old contents; a star: it can be found."""
    yield text(left + 36, 20, title, bold=True)
    lines = -(-run.block_size // ACROSS)
    for slot, place in enumerate(state.memory):
        block, offset = divmod(slot, run.block_size)
        x = left + 36 + CELL * (offset % ACROSS)
        y = 28 + block * (lines * HIGH + 4) + HIGH * (offset // ACROSS)
        if offset == 0:
            name = f"{block}{'*' if state.named[block] else ''}"
            yield text(left + 30, y + 13, name, size=10, fill=INK if state.held[block] else GREY, at="end")
        if place:
            is_live = bool(state.held[block]) and _is_live(state, block, place, run.block_size)
            yield from _slot(run, x, y, place, is_live, slot in new)
        else:
            yield box(x, y, CELL - 2, HIGH - 2, "white", "#ccc")


def _is_live(state: State, block: int, place: Place, size: int) -> bool:
    """Whether a token in a block is one of a sequence that runs, as its table says."""
    tables = (table for name, table in state.tables.items() if name == place[0] or state.named[block])
    return any(block in table and table.index(block) == place[1] // size for table in tables)


def _slot(run: Run, x: float, y: float, place: Place, is_live: bool, is_new: bool) -> Iterable[str]:
    name, position = place
    fill = DARK[name] if is_new else LIGHT[name] if is_live else "#f6f6f6"
    ink = "white" if is_new else INK if is_live else "#999"
    yield box(x, y, CELL - 2, HIGH - 2, fill, DARK[name] if is_live or is_new else "#ccc")
    yield text(x + 3, y + 13, f"{name}{position} {run.text(name, position).strip()}"[:11], size=8.5, fill=ink)


def _ranges(slots: Iterable[int]) -> str:
    """Runs of neighbours: "28 to 36, 24"."""
    groups = ([slot for _, slot in run] for _, run in groupby(enumerate(slots), key=lambda pair: pair[1] - pair[0]))
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in groups)


def svg(parts: Iterable[str], height: float) -> Picture:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" width="{WIDTH}" font-family="sans-serif">'
    return Picture("\n".join([head, box(0, 0, WIDTH, height, "white", "none"), *parts, "</svg>\n"]))


def box(x: float, y: float, width: float, height: float, fill: str, stroke: str, dashed: bool = False) -> str:
    dash = ' stroke-dasharray="3 3"' if dashed else ""
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="2" fill="{fill}" stroke="{stroke}"{dash}/>'


def text(x: float, y: float, said: object, size: float = 12, fill: str = INK, bold: bool = False, at: str = "") -> str:
    anchor, weight = f' text-anchor="{at}"' if at else "", ' font-weight="bold"' if bold else ""
    return f'<text x="{x:g}" y="{y:g}" font-size="{size:g}" fill="{fill}"{anchor}{weight}>{escape(str(said))}</text>'
