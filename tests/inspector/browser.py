"""The page in headless Chromium, with all in one file: whatever else it asks for is refused and noted, unless the test answers it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from folovllm.apps.inspector.page import STATIC, inline_source, whole_page
from folovllm.apps.inspector.scenes import scenes
from tests.docs.browser import CHROMIUM

SAMPLES = Path(__file__).parent / "data"
HOST = "http://inspector.test/"
DRAWN = "new Promise(requestAnimationFrame)"  # what was asked for before is drawn in that frame
TICK = "inspector.player.clock.tick"
SHOWN = "window.inspector?.player && inspector.lanes[0]?.frame != null"
__all__ = ["DRAWN", "HOST", "SAMPLES", "SHOWN", "STATIC", "TICK", "Shown", "chromium", "lines_of", "shown", "sse"]


@dataclass(slots=True)
class Shown:
    """A page, and what it should not have done."""

    page: Any
    errors: list[str] = field(default_factory=list)
    outside: list[str] = field(default_factory=list)
    num_opened: int = 0

    def open(self, what: str | list[Path], options: str = "") -> Any:
        """Show a scene, a sample or files, several of them in a race. Returns Playwright's page."""
        if isinstance(what, str):
            what = scenes()[what].files if what in scenes() else [SAMPLES / what]
        texts = [(file.name, file.read_text(encoding="utf-8")) for file in what]
        self.show(inline_source(texts, "../{}/"), options)
        self.page.wait_for_function(SHOWN)
        return self.page

    def show(self, source: dict[str, Any], options: str = "", **routes: Callable[[Any], object]) -> None:
        """Show a source. `routes` answer what the page asks for below its own address, by the beginnings of their paths."""
        for path, answer in routes.items():
            self.page.route(f"{HOST}{path}**", answer)
        html, self.num_opened = whole_page(source), self.num_opened + 1
        self.page.route(f"{HOST}page?*", lambda route: route.fulfill(body=html, content_type="text/html"))
        self.page.goto(f"{HOST}page?{self.num_opened}#{options}")

    def run(self, body: str, argument: object = None) -> Any:
        """What the body of an async function returns, given `it`; modules are imported as "inspector/reducer.js"."""
        return self.page.evaluate(f"async (it) => {{ {body} }}", argument)


@contextmanager
def chromium() -> Iterator[Any]:
    """Playwright's browser; skips where there is none."""
    playwright = pytest.importorskip("playwright.sync_api", reason="needs Playwright: pip install -e '.[dev]'")
    if CHROMIUM is None:
        pytest.skip("needs a browser: apt-get install chromium")
    flags = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking"]
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=flags)
        yield browser
        browser.close()


@contextmanager
def shown(browser: Any, **context: Any) -> Iterator[Shown]:
    """A page of a context of its own. Whoever leaves hears of its errors and of requests to anywhere else."""
    with browser.new_context(**{"viewport": {"width": 1440, "height": 900}, **context}) as its:
        its.set_default_timeout(60_000)
        here = Shown(its.new_page())
        here.page.on("pageerror", lambda error: here.errors.append(str(error)))
        here.page.on("console", lambda said: said.type == "error" and here.errors.append(said.text))

        def refuse(route: Any) -> None:
            here.outside.append(route.request.url)
            route.abort()

        its.route(lambda url: not url.startswith(("data:", "blob:")), refuse)
        yield here
        assert here.errors == []
        assert here.outside == [], "the page asks somebody else"


def sse(lines: list[str]) -> str:
    """Lines as server-sent events, two an event."""
    return "".join(f"data: {a}\ndata: {b}\n\n" for a, b in zip(lines[::2], [*lines[1::2], ""], strict=False))


def lines_of(name: str) -> list[Any]:
    """A sample."""
    return [json.loads(line) for line in (SAMPLES / name).read_text(encoding="utf-8").splitlines()]
