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
    titled = [each if isinstance(each, tuple) else (each.milestone.upper(), each) for each in runs]
    wide = min(WIDEST, (WIDTH - 46) // max(len(run.turns) for _, run in titled))
    parts: list[str] = []
    top = 0
    for title, run in titled:
        parts += _lanes(run, f"{title}: {len(run.turns)} steps", top, wide)
        top += 3 * LINE + 64
    return svg(parts, top - 8)


def _lanes(run: Run, title: str, top: int, wide: int) -> Iterable[str]:
    yield text(8, top + 18, title, size=14, bold=True)
    for turn in run.turns:
        yield text(40 + wide * (turn.number + 0.5), top + 36, str(turn.number), size=10, fill=GREY, middle=True)
    for row, request in enumerate(example().requests):
        y = top + 42 + LINE * row
        yield text(14, y + 16, request.name, fill=DARK[request.name], bold=True)
        for doing, cells in groupby(run.turns, key=lambda turn: _doing(turn, request.name)):
            turns = list(cells)
            yield from _stretch(doing, request.name, turns, y, wide)


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
            yield text(x + width / 2, y + 16, "waits", size=10, fill=GREY, middle=True)
    elif doing == "gives way":
        yield box(x + 2, y + 2, width - 4, LINE - 4, "white", RED)
        yield text(x + width / 2, y + 16, "out", size=10, fill=RED, middle=True)
    elif doing:
        scheduled = next(scheduled for scheduled in turns[0].scheduled_seqs if scheduled.name == name)
        tokens, found = scheduled.end - scheduled.start, turns[0].hits.get(name, 0)
        is_dark = tokens > 1 or not scheduled.draws
        yield box(x + 1, y + 1, width - 2, LINE - 2, (DARK if is_dark else LIGHT)[name], DARK[name])
        label = f"{found}+{tokens}" if found else str(tokens)
        yield text(x + width / 2, y + 16, label, size=11, fill="white" if is_dark else INK, middle=True)


def blocks(*runs: Run | tuple[str, Run]) -> Picture:
    """Who holds which block: a row a block, as high as it is long, a column a step. What is not filled is reserved and empty."""
    titled = [each if isinstance(each, tuple) else (each.milestone.upper(), each) for each in runs]
    wide = min(WIDEST, (WIDTH - 46) // max(len(run.turns) for _, run in titled))
    parts: list[str] = []
    top = 0.0
    for title, run in titled:
        parts += [text(8, top + 18, title, size=14, bold=True), *_holders(run, top + 26, wide)]
        top += 46 + SLOT * len(run.turns[0].after.memory)
    return svg(parts, top - 8)


def _holders(run: Run, top: float, wide: int) -> Iterable[str]:
    high = SLOT * run.block_size
    for turn in run.turns:
        x = 40 + wide * turn.number
        yield text(x + wide / 2, top + 10, str(turn.number), size=10, fill=GREY, middle=True)
        for block, _ in enumerate(turn.after.held):
            yield box(x + 1, top + 14 + high * block, wide - 2, high - 1, "white", "#ddd")
        held = _filled(run, turn)
        for (block, name), tokens in held.items():
            sharers = [other for taken, other in held if taken == block]
            part = high / len(sharers)
            y = top + 14 + high * block + part * sharers.index(name)
            yield box(x + 1, y, (wide - 2) * tokens / run.block_size, part - 1, LIGHT[name], "none")
            yield box(x + 1, y, wide - 2, part - 1, "none", DARK[name])
            yield text(x + wide / 2, y + part / 2 + 4, name, size=10, fill=DARK[name], middle=True, bold=True)
    for block in range(len(run.turns[0].after.held)):
        yield text(34, top + 18 + high * (block + 0.5), str(block), size=10, fill=GREY, end=True)


def _filled(run: Run, turn: Turn) -> dict[tuple[int, str], int]:
    """Of each block and each request that holds it in a step, how many of its tokens lie there."""
    found: dict[tuple[int, str], int] = {}
    for scheduled in turn.scheduled_seqs:
        for i, block in enumerate(_table(turn, scheduled.name, scheduled, run.block_size)):
            found[block, scheduled.name] = min(run.block_size, scheduled.end - i * run.block_size)
    return found


def step(run: Run, number: int) -> Picture:
    """One step: the tokens of each request, its block table, the slots of the new tokens, and the memory before and after."""
    turn, height = run.turns[number], _memory_height(run)
    parts = [text(8, 20, f"{run.milestone.upper()}, step {number}", size=14, bold=True)]
    parts += [text(8, 38 + 15 * i, line, size=11) for i, line in enumerate(_story(run, turn))]
    top = 52 + 15 * len(_story(run, turn))
    for name in sorted(
        {*turn.after.tables, *turn.before.tables, *(scheduled.name for scheduled in turn.scheduled_seqs), *turn.refused}
    ):
        scheduled = next((scheduled for scheduled in turn.scheduled_seqs if scheduled.name == name), None)
        parts += _request(run, turn, name, scheduled, top)
        top += 78
    new = {slot for scheduled in turn.scheduled_seqs for slot in scheduled.slots}
    left = WIDTH - 2 * (ACROSS * CELL + 40)
    parts += _memory(run, turn.before, left, "memory before", frozenset())
    parts += _memory(run, turn.after, left + ACROSS * CELL + 40, "memory after", new)
    return svg(parts, max(top, height))


def _story(run: Run, turn: Turn) -> list[str]:
    """What else happened, in sentences."""
    said = [f"{name} arrives." for name in turn.arrived]
    said += [f"{name} begins with {hit} tokens that are in the cache." for name, hit in turn.hits.items()]
    for name, of in turn.preempted.items():
        said.append(
            f"{name} gives way{f' to {of}' if of != name else ''}, and loses {turn.lost[name]} computed tokens."
        )
    said += [f"{name} waits: {WANT[why]}." for name, why in turn.refused.items() if name not in turn.preempted]
    if turn.drawn:
        drawn = (
            f"{name} \N{LEFT DOUBLE QUOTATION MARK}{run.texts[token].strip()}\N{RIGHT DOUBLE QUOTATION MARK}"
            for name, token in turn.drawn.items()
        )
        said.append(f"Sampled: {', '.join(drawn)}.")
    return said + [f"{name} is done." for name in turn.finished]


def _request(run: Run, turn: Turn, name: str, scheduled: ScheduledSequence | None, top: float) -> Iterable[str]:
    """Positions of a request's tokens in groups of a block, the table below them, and the new tokens' slots."""
    start, end = (scheduled.start, scheduled.end) if scheduled else (0, 0)
    table = _table(turn, name, scheduled, run.block_size)
    yield text(8, top + 14, name, fill=DARK[name], bold=True)
    wide, group = 16, run.block_size * 16 + 6
    for p in range(end):
        x = 30 + group * (p // run.block_size) + wide * (p % run.block_size)
        is_new = p >= start
        yield box(x, top, wide - 1, 18, (DARK if is_new else LIGHT)[name], DARK[name])
        yield text(x + wide / 2, top + 13, str(p), size=8.5, fill="white" if is_new else INK, middle=True)
    for i, block in enumerate(table if scheduled else ()):
        x = 30 + group * i
        wide_here = wide * min(run.block_size, end - i * run.block_size)
        yield text(x + max(wide_here, 52) / 2 - 2, top + 34, f"↓ block {block}", size=10, middle=True)
    slots = list(scheduled.slots) if scheduled else []
    if scheduled and slots:
        yield text(30, top + 52, f"slot mapping of the new: {_ranges(slots)}", size=10, fill=INK)
    if not scheduled:
        yield text(30, top + 14, "takes no part in this step", size=11, fill=GREY)


def _table(turn: Turn, name: str, scheduled: ScheduledSequence | None, size: int) -> tuple[int, ...]:
    """The block table of a request in a step; if it ended in the step, as far as the slots say."""
    if name in turn.after.tables:
        return turn.after.tables[name]
    known = turn.before.tables.get(name, ())
    named = dict.fromkeys(slot // size for slot in (scheduled.slots if scheduled else ()))
    return known + tuple(block for block in named if block not in known)


def _memory_height(run: Run) -> int:
    slots, size = len(run.turns[0].after.memory), max(run.block_size, 1)
    return 34 + HIGH * (slots // ACROSS) + 4 * (slots // size)


def _memory(run: Run, state: State, left: float, title: str, new: Iterable[int]) -> Iterable[str]:
    """Each block in lines of four slots. A grey number: the block is free, and has its old contents; a star: it can be found."""
    yield text(left + 36, 20, title, bold=True)
    fresh, lines = frozenset(new), -(-run.block_size // ACROSS)
    for slot, place in enumerate(state.memory):
        block, offset = divmod(slot, run.block_size)
        x = left + 36 + CELL * (offset % ACROSS)
        y = 28 + block * (lines * HIGH + 4) + HIGH * (offset // ACROSS)
        if offset == 0:
            name = f"{block}{'*' if state.named[block] else ''}"
            yield text(left + 30, y + 13, name, size=10, fill=INK if state.held[block] else GREY, end=True)
        yield from _slot(
            run, x, y, place, bool(state.held[block]) and _is_live(state, slot, run.block_size), slot in fresh
        )


def _is_live(state: State, slot: int, size: int) -> bool:
    """Whether a slot holds a token of a sequence that runs, as its table says."""
    if (place := state.memory[slot]) is None:
        return False
    block = slot // size
    return any(
        block in table and (name == place[0] or state.named[block]) and table.index(block) == place[1] // size
        for name, table in state.tables.items()
    )


def _slot(run: Run, x: float, y: float, place: Place | None, is_live: bool, is_new: bool) -> Iterable[str]:
    if place is None:
        yield box(x, y, CELL - 2, HIGH - 2, "white", "#ccc")
        return
    name, position = place
    fill = DARK[name] if is_new else LIGHT[name] if is_live else "#f6f6f6"
    ink = "white" if is_new else INK if is_live else "#999"
    yield box(x, y, CELL - 2, HIGH - 2, fill, DARK[name] if is_live or is_new else "#ccc")
    yield text(x + 3, y + 13, f"{name}{position} {run.text(name, position).strip()}"[:11], size=8.5, fill=ink)


def _ranges(slots: list[int]) -> str:
    """Runs of neighbours: "28 to 36, 24"."""
    runs: list[list[int]] = []
    for slot in slots:
        if runs and slot == runs[-1][-1] + 1:
            runs[-1].append(slot)
        else:
            runs.append([slot])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs)


def svg(parts: Iterable[str], height: float) -> Picture:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" width="{WIDTH}" font-family="sans-serif">'
    return Picture("\n".join([head, box(0, 0, WIDTH, height, "white", "none"), *parts, "</svg>\n"]))


def box(x: float, y: float, width: float, height: float, fill: str, stroke: str, dashed: bool = False) -> str:
    dash = ' stroke-dasharray="3 3"' if dashed else ""
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="2" fill="{fill}" stroke="{stroke}"{dash}/>'


def text(
    x: float,
    y: float,
    text: str,
    *,
    size: float = 12,
    fill: str = INK,
    bold: bool = False,
    middle: bool = False,
    end: bool = False,
) -> str:
    anchor = ' text-anchor="middle"' if middle else ' text-anchor="end"' if end else ""
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x:g}" y="{y:g}" font-size="{size:g}" fill="{fill}"{anchor}{weight}>{escape(text)}</text>'
