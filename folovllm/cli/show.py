"""The KV cache as a picture: a character a block, a letter and a colour a sequence. `--show-steps` prints it."""

from __future__ import annotations

from rich.text import Text

from folovllm.watcher import Watched, Watcher

BLOCKS_A_LINE = 64
MAX_LINES = 16  # a large pool would fill the screen
COLOURS = ("red", "green", "yellow", "blue", "magenta", "cyan", "bright_red", "bright_green", "bright_blue")
FREE, SHARED = "·", "#"


def draw_pool(watcher: Watcher) -> Text:
    """The pool after a step, in lines of 64 blocks that begin with the first block's number.

    `A` is a full block of a sequence, `a` one that it fills in part, `#` one that several share, `·` a free one. A
    sequence keeps its letter and its colour for as long as it lives. Lines with free blocks only are left out.
    """
    holders, size = watcher.holders(), watcher.block_size
    firsts = [i for i in range(0, len(holders), BLOCKS_A_LINE) if any(holders[i : i + BLOCKS_A_LINE])]
    lines = []
    for first in firsts[:MAX_LINES]:
        cells = [_cell(held, size) for held in holders[first : first + BLOCKS_A_LINE]]
        lines.append(Text.assemble((f"{first:>6} ", "dim"), *cells))
    if len(firsts) > MAX_LINES:
        lines.append(Text(f"       and {len(firsts) - MAX_LINES} lines more", style="dim"))
    return Text("\n").join(lines)


def _cell(held: list[tuple[Watched, int]], block_size: int) -> tuple[str, str]:
    """The character of a block and its style."""
    if not held:
        return FREE, "dim"
    if len(held) > 1:
        return SHARED, "bold"
    seq, tokens = held[0]
    seq_id = seq.added.seq_id
    letter = chr(ord("a") + seq_id % 26)
    return letter.upper() if tokens == block_size else letter, COLOURS[seq_id % len(COLOURS)]
