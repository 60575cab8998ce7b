"""What `--show-steps` prints: a line a step, and the KV cache as a picture: a character a block, a letter and a colour a sequence."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from rich.text import Text

from folovllm.apps.cli.terminal import stderr
from folovllm.apps.inspector.watcher import Watched, Watcher
from folovllm.engine.events import Event
from folovllm.engine.metrics import StepLog, StepStats, imbalance

BLOCKS_A_LINE = 64
MAX_LINES = 16  # a large pool would fill the screen
COLOURS = ("red", "green", "yellow", "blue", "magenta", "cyan", "bright_red", "bright_green", "bright_blue")
FREE, SHARED = "·", "#"


class StepPrinter:
    """A listener that prints on stderr: a line for each step that ended, with overlap none, one or two, and under them the lines of
    the pool that changed."""

    def __init__(self) -> None:
        self._log, self._watcher = StepLog(), Watcher()
        self._printed: list[Text] = []

    def __call__(self, events: SequenceOf[Event]) -> None:
        """Print what happened."""
        self._log(events)
        self._watcher(events)
        if steps := self._log.take():
            for stats in steps:
                stderr().print(step_line(stats), style="dim", soft_wrap=True)
            pool = draw_pool(self._watcher).split()
            for line in pool:
                if line.plain and line not in self._printed:
                    stderr().print(line, soft_wrap=True)
            self._printed = list(pool)


def step_line(stats: StepStats) -> str:
    """`step 3     waiting 2   running 4   tokens 4      12.3 ms   KV blocks 40`; with drafts also how many were accepted, and
    with offloading how many blocks left the device and came back.

    Where experts are counted, also how uneven their load is: the busiest one's, in multiples of an equal share.
    """
    line = f"step {stats.index:<5} waiting {stats.waiting:<4} running {stats.running:<4} tokens {stats.num_tokens:<6}"
    line += f" {stats.seconds * 1e3:8.2f} ms   KV blocks {stats.kv_blocks_used}"
    if stats.num_draft_tokens:
        line += f"   draft tokens accepted {stats.num_accepted} of {stats.num_draft_tokens}"
    if stats.num_offloaded or stats.num_loaded:
        line += f"   offloaded {stats.num_offloaded} loaded {stats.num_loaded}"
    if stats.experts:
        line += f"   busiest expert {max(map(imbalance, stats.experts)):.1f}x"
    return line


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
