"""Draws the book's pictures of A, B and C (`milestones/running_example.json`), and of experts, from the live engine: `make recordings`.

`--check` compares them with the files: a test does that, so that the pictures show what the engine does today.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

import experts  # noqa: E402

from milestones.pictures import DARK, GREY, INK, LIGHT, RED, Picture, blocks, box, lanes, step, svg, text  # noqa: E402
from milestones.running_example import Run, play  # noqa: E402

FOLDER = ROOT / "docs" / "img"


@cache
def run(milestone: str, static: bool = False) -> Run:
    """A, B and C in one milestone, played once."""
    return play(milestone, static=static)


def one_step(milestone: str, number: int) -> Picture:
    """A step of theirs."""
    return step(run(milestone), number)


def gap() -> Picture:
    """A decodes while a prompt B of 8,000 tokens is computed, whole or in chunks. A step of c tokens takes 1 + c / 500 units of time."""
    parts = list[str]()
    for number, (title, chunk) in enumerate((("Whole prompt", 8_000), ("Chunks of 2,000", 2_000))):
        top, unit = 150 * number, 34
        parts.append(
            text(8, top + 18, f"{title}: A waits {1 + chunk // 500} units for its next token", size=14, bold=True)
        )
        x = 40.0
        for tokens in [0, *[chunk] * (8_000 // chunk), 0]:
            wide = unit * (1 + tokens / 500)
            for row, name in enumerate("AB"):
                y = top + 32 + 40 * row
                if name == "A" or tokens:
                    parts.append(box(x, y, wide - 2, 32, LIGHT[name] if name == "A" else DARK[name], DARK[name]))
                    said = "1" if name == "A" else f"{tokens:,}"
                    parts.append(text(x + wide / 2, y + 21, said, fill=INK if name == "A" else "#fff", at="middle"))
            x += wide
            parts.append(
                f'<line x1="{x - 1}" y1="{top + 26}" x2="{x - 1}" y2="{top + 110}" stroke="{GREY}" stroke-dasharray="2 3"/>'
            )
            if tokens and x < 40 + unit * 22:
                parts.append(text(x - 1, top + 124, "a token of A", size=10, fill=RED, at="middle"))
        for row, name in enumerate("AB"):
            parts.append(text(14, top + 53 + 40 * row, name, fill=DARK[name], bold=True))
    return svg(parts, 290)


PICTURES: dict[str, Callable[[], Picture]] = {
    "abc_m1": lambda: lanes(("One at a time (M1)", run("m1"))),
    "abc_m2": lambda: lanes(("Static batching", run("m2", static=True)), ("Continuous batching (M2)", run("m2"))),
    "abc_m2_step_7": partial(one_step, "m2", 7),
    "abc_m3": lambda: lanes(("Two long blocks (M2)", run("m2")), ("Ten short blocks (M3)", run("m3"))),
    "abc_m3_blocks": lambda: blocks(("Two long blocks (M2)", run("m2")), ("Ten short blocks (M3)", run("m3"))),
    "abc_m3_step_2": partial(one_step, "m3", 2),
    "abc_m3_step_4": partial(one_step, "m3", 4),
    "abc_m3_step_7": partial(one_step, "m3", 7),
    "abc_m5": lambda: lanes(("Whole prompts, nothing kept (M4)", run("m4")), ("Chunks and prefixes (M5)", run("m5"))),
    "abc_m5_gap": gap,
    "abc_m5_step_2": partial(one_step, "m5", 2),
    "x4_words": experts.words_picture,
    "x4_load": experts.load_picture,
    "x4_batch": experts.batch_picture,
}  # the files are docs/img/NAME.svg


def main() -> None:
    """Draw them, or compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare with the files instead of writing them")
    wanted = parser.parse_args()
    for name, draw in PICTURES.items():
        file, picture = FOLDER / f"{name}.svg", draw()
        if wanted.check and file.read_text("utf-8") != picture:
            sys.exit(f"docs/img/{name}.svg: the engine does something else by now. Look at it, then: make recordings")
        if not wanted.check:
            file.write_text(picture, "utf-8")
        print(f"docs/img/{name}.svg: {len(picture)} bytes")


if __name__ == "__main__":
    main()
