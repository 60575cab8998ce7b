"""The page in headless Chromium: its files come from the checkout, and whatever else it asks for is refused and noted."""

from __future__ import annotations

import json
import mimetypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.docs.browser import CHROMIUM

STATIC = Path(__file__).resolve().parents[2] / "folovllm" / "apps" / "inspector" / "static"
SAMPLES = Path(__file__).parent / "data"
HOST = "http://inspector.test/"
DRAWN = "new Promise(requestAnimationFrame)"  # what was asked for before is drawn in that frame
TICK = "inspector.player.clock.tick"
SHOWN = "window.inspector?.player && inspector.lanes[0]?.frame != null"


@dataclass(slots=True)
class Shown:
    """A page, and what it should not have done."""

    page: Any
    recordings: dict[str, str] = field(default_factory=dict)  # name -> the text that /name gives
    errors: list[str] = field(default_factory=list)
    outside: list[str] = field(default_factory=list)

    def open(self, *names: str, **options: object) -> Any:
        """Show samples or `recordings` by name: one, or two in a race. Returns Playwright's page."""
        address = "&".join(f"{kind}={name}" for kind, name in zip(("src", "race"), names, strict=False))
        more = "".join(f"&{name}={value}" for name, value in options.items())
        self.page.goto(f"{HOST}index.html?{address}{more}")
        self.page.wait_for_function(SHOWN)
        return self.page

    def run(self, body: str, argument: object = None) -> Any:
        """What the body of an async function returns, given `it`; modules are imported as "/reducer.js"."""
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
        its.route("**/*", lambda route: answer(here, route))
        yield here
        assert here.errors == []
        assert here.outside == [], "the page asks somebody else"


def answer(here: Shown, route: Any) -> None:
    """Give a file of the page, a sample, or a recording of the test's."""
    url = route.request.url
    name = url.removeprefix(HOST).split("?")[0]
    if url.startswith(("data:", "file:", "blob:")):
        route.continue_()
    elif name in here.recordings:
        route.fulfill(body=here.recordings[name], content_type="application/jsonl")
    elif url.startswith(HOST) and (file := STATIC / name).is_file():
        route.fulfill(body=file.read_bytes(), content_type=mimetypes.guess_type(name)[0] or "text/plain")
    elif url.startswith(HOST) and (file := SAMPLES / name).is_file():
        route.fulfill(body=file.read_bytes(), content_type="application/jsonl")
    else:
        here.outside.append(url)
        route.abort()


def sse(lines: list[str]) -> str:
    """Lines as server-sent events, two an event."""
    return "".join(f"data: {a}\ndata: {b}\n\n" for a, b in zip(lines[::2], [*lines[1::2], ""], strict=False))


def show_source(here: Shown, source: dict[str, Any], routes: dict[str, Any]) -> None:
    """The page with a source of its own, and who answers what it asks for."""
    for path, answer in routes.items():
        here.page.route(HOST + path, answer)
    page = (STATIC / "index.html").read_text(encoding="utf-8").replace(">null<", f">{json.dumps(source)}<")
    here.page.route(HOST + "live.html*", lambda route: route.fulfill(body=page, content_type="text/html"))
    here.page.goto(HOST + "live.html")


def lines_of(name: str) -> list[Any]:
    """A sample."""
    return [json.loads(line) for line in (SAMPLES / name).read_text(encoding="utf-8").splitlines()]
