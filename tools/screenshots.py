"""`make screenshots`: the pictures of the inspector in README and the book, of recordings of the real engine, by a headless Chromium.

A picture is the page that a reader gets, at a moment of its recording. Where there is no browser nothing is written.
"""

from __future__ import annotations

import io
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from folovllm.apps.inspector.page import one_file
from folovllm.apps.inspector.scenes import scenes

ROOT = Path(__file__).resolve().parents[1]
PICTURES, BOOK = ROOT / "docs" / "img", ROOT / "docs" / "assets" / "recordings"
SAMPLES = ROOT / "tests" / "inspector" / "data"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
READY = "window.inspector?.player && inspector.lanes[0]?.frame != null"
DRAWN = "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done())))"


@dataclass(slots=True, frozen=True)
class Picture:
    """A page at a moment, `width` times `height` pixels."""

    name: str
    recordings: tuple[Path, ...]
    moment: int
    width: int
    height: int
    embedded: bool = False
    keys: tuple[str, ...] = ()  # pressed before


WANTED = [
    Picture("inspector", (SAMPLES / "m3.jsonl",), 18, 1280, 1010),
    Picture("inspector_prefixes", (SAMPLES / "m5.jsonl",), 12, 1280, 1010, keys=("]",)),
    Picture("2_recording", (BOOK / "2_one_at_a_time.jsonl", BOOK / "2_continuous_batching.jsonl"), 8, 760, 420, True),
    Picture("3_recording", (BOOK / "3_slots.jsonl", BOOK / "3_blocks.jsonl"), 44, 760, 420, True),
    Picture("x3_recording", (BOOK / "x3_guesses.jsonl",), 4, 760, 420, True),
    Picture("6_recording", (BOOK / "6_abc.jsonl",), 7, 1280, 900),
    Picture("mini", (ROOT / "milestones" / "mini" / "recording.jsonl",), 16, 1280, 900),
    *(
        Picture(f"scene_{one.name}", tuple(one.files), one.stop, 760, 600 if one.sampling else 420, True)
        for one in scenes().values()
    ),
]


@contextmanager
def shown(browser: Any, picture: Picture, folder: Path) -> Iterator[Any]:
    """A picture's page in the browser, drawn."""
    file = folder / f"{picture.name}.html"
    one_file(list(picture.recordings), file)
    size, scale = {"width": picture.width, "height": picture.height}, 1.5 if picture.embedded else 1
    with browser.new_context(viewport=size, device_scale_factor=scale, color_scheme="light") as context:
        page = context.new_page()
        page.goto(f"{file.as_uri()}?{'embed' if picture.embedded else ''}#t=0")
        page.wait_for_function(READY)
        yield page


def take(browser: Any, picture: Picture, folder: Path) -> Path:
    """Show a picture's page at its moment, and write what is seen."""
    out = PICTURES / f"{picture.name}.png"
    with shown(browser, picture, folder) as page:
        tick = f"inspector.player.clock.tickOf(inspector.lanes[0].recording, {picture.moment})"
        page.evaluate(f"inspector.player.go({tick})")
        for key in picture.keys:
            page.keyboard.press(key)
        page.evaluate(DRAWN)
        seen = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
        seen.quantize(256, dither=Image.Dither.NONE).save(out, optimize=True)
    return out


def film(browser: Any, folder: Path) -> Path:
    """Play a recording in which memory runs out, a step a frame, and write it as a moving picture for README."""
    out, frames = PICTURES / "inspector.webp", []
    with shown(browser, Picture("film", (SAMPLES / "m3.jsonl",), 0, 1120, 860), folder) as page:
        for moment in range(page.evaluate("inspector.player.clock.length")):
            page.evaluate(f"inspector.player.go({moment}), {DRAWN}")
            frames.append(Image.open(io.BytesIO(page.screenshot())).resize((896, 688), Image.Resampling.LANCZOS))
    durations = [500] * (len(frames) - 1) + [3000]  # milliseconds
    frames[0].save(out, save_all=True, append_images=frames[1:], duration=durations, loop=0, quality=55, method=6)
    return out


def main() -> None:
    """Write all pictures."""
    if CHROMIUM is None:
        sys.exit("there is no browser: apt-get install chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver, tempfile.TemporaryDirectory() as folder:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        for out in (film(browser, Path(folder)), *(take(browser, picture, Path(folder)) for picture in WANTED)):
            print(f"{out.relative_to(ROOT)}: {out.stat().st_size} bytes")
        browser.close()


if __name__ == "__main__":
    main()
