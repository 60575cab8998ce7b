"""The KV cache as a picture: a character a page, a letter and a colour a sequence. `--show-steps` prints it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text

if TYPE_CHECKING:
    from folovllm.engine.llm_engine import LLMEngine
    from folovllm.request import Sequence

PAGES_A_LINE = 64
MAX_LINES = 16  # a large pool would fill the screen
COLOURS = ("red", "green", "yellow", "blue", "magenta", "cyan", "bright_red", "bright_green", "bright_blue")
FREE, SHARED = "·", "#"


def page_holders(engine: LLMEngine) -> list[list[tuple[Sequence, int]]]:
    """Who holds each page, [N]: pairs of a sequence and how many of its tokens lie there (0 to B).

    An empty list is a free page; several entries are a prefix that sequences share. A cache that is no pool of pages
    (M1) has none.
    """
    size = engine.setup.block_size
    holders: list[list[tuple[Sequence, int]]] = [[] for _ in range(engine.stats().kv_blocks_total)]
    for seq in engine.scheduler.running:
        for i, block_id in enumerate(seq.block_table):
            holders[block_id].append((seq, max(0, min(size, seq.num_computed_tokens - i * size))))
    return holders


def draw_pool(engine: LLMEngine) -> Text:
    """The pool after a step, in lines of 64 pages that begin with the first page's number.

    `A` is a full page of a sequence, `a` one that it fills in part, `#` one that several share, `·` a free one. A
    sequence keeps its letter and its colour for as long as it lives. Lines with free pages only are left out.
    """
    holders, size = page_holders(engine), engine.setup.block_size
    firsts = [i for i in range(0, len(holders), PAGES_A_LINE) if any(holders[i : i + PAGES_A_LINE])]
    lines = []
    for first in firsts[:MAX_LINES]:
        cells = [_cell(held, size) for held in holders[first : first + PAGES_A_LINE]]
        lines.append(Text.assemble((f"{first:>6} ", "dim"), *cells))
    if len(firsts) > MAX_LINES:
        lines.append(Text(f"       and {len(firsts) - MAX_LINES} lines more", style="dim"))
    return Text("\n").join(lines)


def _cell(held: list[tuple[Sequence, int]], block_size: int) -> tuple[str, str]:
    """The character of a page and its style."""
    if not held:
        return FREE, "dim"
    if len(held) > 1:
        return SHARED, "bold"
    seq, tokens = held[0]
    letter = chr(ord("a") + seq.seq_id % 26)
    return letter.upper() if tokens == block_size else letter, COLOURS[seq.seq_id % len(COLOURS)]
