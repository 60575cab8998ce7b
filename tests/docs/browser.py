"""The built book in a real browser, without a network: what a page asks for elsewhere, draws, cuts off, and how it can be read."""

from __future__ import annotations

import contextlib
import shutil
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
NOBODY_ELSE = "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"
NO_WORKER = "window.Worker = class extends EventTarget { postMessage() {} }"
DESK, PHONE = {"width": 1440, "height": 1200}, {"width": 390, "height": 844}  # pixels
# A drawn diagram is a <div class="mermaid"> in the place of the <pre>; what is inside it no script can see, but its height.
DRAWN = "[...document.querySelectorAll('div.mermaid')].filter(diagram => diagram.clientHeight > 40).length"
CUT = """[...document.querySelectorAll('pre > code')].filter(code => code.scrollWidth > code.clientWidth + 1)
    .map(code => code.innerText)"""
TOO_WIDE = "document.documentElement.scrollWidth - innerWidth"
TALLEST = "Math.max(0, ...[...document.querySelectorAll('div.mermaid')].map(diagram => diagram.clientHeight))"
OPENED = "for (const fold of document.querySelectorAll('details')) fold.open = true"
NO_ALT = "[...document.images].filter(image => !image.alt.trim()).map(image => image.src)"
SEARCHED = "[...document.querySelectorAll('.md-search-result__link')].map(link => new URL(link.href).pathname)"
# Of a hidden input, as of the switch of colours, the label beside it shows the focus.
FOCUSED = """(() => { const now = document.activeElement, hidden = now.matches('.md-option');
    const style = getComputedStyle(hidden ? now.nextElementSibling : now);
    return [now.innerText.trim(), style.outlineStyle !== 'none' || style.boxShadow !== 'none'] })()"""
# WCAG 2, 1.4.3: of each text the ratio of its colour to what is behind it. A canvas makes numbers of any CSS colour.
FAINT = """(() => {
    const ctx = Object.assign(document.createElement('canvas'), {width: 1, height: 1}).getContext('2d', {willReadFrequently: true});
    const rgba = colour => { ctx.clearRect(0, 0, 1, 1); ctx.fillStyle = colour; ctx.fillRect(0, 0, 1, 1);
        return [...ctx.getImageData(0, 0, 1, 1).data]; };
    const over = (top, under) => top.slice(0, 3).map((c, i) => c * top[3] / 255 + under[i] * (1 - top[3] / 255));
    const behind = element => { const colour = element ? rgba(getComputedStyle(element).backgroundColor) : [255, 255, 255, 255];
        return colour[3] === 255 || !element ? colour.slice(0, 3) : over(colour, behind(element.parentElement)); };
    const light = colour => colour.map(c => c / 255).map(c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
        .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
    const found = new Map(), walk = document.createTreeWalker(document.querySelector('main'), NodeFilter.SHOW_TEXT);
    while (walk.nextNode()) {
        const element = walk.currentNode.parentElement, style = getComputedStyle(element);
        if (!walk.currentNode.data.trim() || element.closest('svg, script, style, .headerlink') || !element.checkVisibility()) continue;
        const ground = behind(element), [a, b] = [light(over(rgba(style.color), ground)), light(ground)].sort((x, y) => y - x);
        const ratio = (a + 0.05) / (b + 0.05), size = parseFloat(style.fontSize);
        if (ratio < (size >= 24 || (size >= 18.6 && style.fontWeight >= 700) ? 3 : 4.5))
            found.set(`${style.color} on ${ground.map(Math.round)}`, `${ratio.toFixed(2)}: ${walk.currentNode.data.trim().slice(0, 40)}`);
    }
    return [...found].map(pair => pair.join(' '));
})()"""


class Quiet(SimpleHTTPRequestHandler):
    """Hands out files, and says nothing of it. A browser keeps what it has got, which a routed page would not."""

    protocol_version = "HTTP/1.1"  # a connection serves many requests

    def log_message(self, *_: Any) -> None: ...


@dataclass(slots=True)
class Book:
    """A built site on a server of its own, and a browser that reaches nobody else."""

    chromium: Any
    address: str


@contextlib.contextmanager
def running(site: Path) -> Iterator[Book]:
    """Start both. Each test opens a context, which shares nothing with another test's."""
    playwright = pytest.importorskip("playwright.sync_api", reason="needs Playwright: pip install -e '.[dev]'")
    flags = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking", NOBODY_ELSE]
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=site))
    with server, playwright.sync_playwright() as driver:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        chromium = driver.chromium.launch(executable_path=CHROMIUM, args=flags)
        yield Book(chromium, f"http://127.0.0.1:{server.server_port}/")
        chromium.close()
        server.shutdown()


@contextlib.contextmanager
def opened(book: Book, colours: str = "null", search: bool = False) -> Iterator[tuple[Any, list[str]]]:
    """A page, whose addresses begin at the book's; and what it asked for elsewhere, with the console's errors.

    `colours` imitates the system's choice, in frames as well: "light", "dark" or, for none, "null". Unless it is to `search`,
    no page works out the index, which takes longer than all else.
    """
    outside: list[str] = []
    with book.chromium.new_context(viewport=DESK, color_scheme=colours, base_url=book.address) as context:

        def note(request: Any) -> None:
            if not request.url.startswith((book.address, "data:", "blob:")):
                outside.append(f"{request.frame.url} -> {request.url}")

        context.on("request", note)
        context.on("console", lambda said: outside.append(said.text) if said.type == "error" else None)
        if not search:
            context.add_init_script(NO_WORKER)
        yield context.new_page(), outside


@dataclass(slots=True)
class Seen:
    """What the browser saw of a page."""

    diagrams: int
    tallest: int  # pixels, of the diagrams
    cut: list[str]  # code
    no_alt: list[str]  # pictures
    too_wide: int  # pixels, on a phone


def visit(page: Any, file: Path, path: str) -> Seen:
    """Show a page of a built site, all its folds open, 1,440 pixels wide, and then as wide as a phone."""
    page.set_viewport_size(DESK)
    page.goto(path)
    with contextlib.suppress(pytest.importorskip("playwright.sync_api").TimeoutError):
        page.wait_for_function(f"{DRAWN} >= {num_diagrams(file)}", timeout=5000)
    page.evaluate(OPENED)
    found = [page.evaluate(what) for what in (DRAWN, TALLEST, CUT, NO_ALT)]
    page.set_viewport_size(PHONE)
    return Seen(*found, page.evaluate(TOO_WIDE))


def num_diagrams(file: Path) -> int:
    """How many diagrams the page has, as built."""
    return file.read_text("utf-8").count('<pre class="mermaid">')
