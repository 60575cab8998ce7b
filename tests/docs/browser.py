"""The built book in a real browser, without a network: what a page asks for elsewhere, draws, cuts off, and how it can be read."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
HOST = "http://book.test"
DESK, PHONE = (1440, 1200), (390, 844)  # pixels
# A drawn diagram is a <div class="mermaid"> in the place of the <pre>; what is inside it no script can see, but its height.
DRAWN = "[...document.querySelectorAll('div.mermaid')].filter(diagram => diagram.clientHeight > 40).length"
CUT = """[...document.querySelectorAll('pre > code')].filter(code => code.scrollWidth > code.clientWidth + 1)
    .map(code => code.innerText)"""
TOO_WIDE = "document.documentElement.scrollWidth - innerWidth"
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


@dataclass(slots=True)
class Visit:
    """What the browser saw."""

    seen: list[dict[str, Any]] = field(default_factory=list)  # of each page: path, diagrams, the code that is cut off
    outside: list[str] = field(default_factory=list)  # page -> address


@contextlib.contextmanager
def opened(site: Path, size: tuple[int, int] = DESK, colours: str = "null") -> Iterator[tuple[Any, list[str]]]:
    """A page of Chromium that gets the site's files under `HOST` and nothing else; and what it asked for elsewhere.

    `colours` imitates the system's choice, in frames as well: "light", "dark" or, for none, "null".
    """
    playwright = pytest.importorskip("playwright.sync_api", reason="needs Playwright: pip install -e '.[dev]'")
    outside: list[str] = []
    with playwright.sync_playwright() as driver:
        flags = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking"]
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=flags)
        page = browser.new_page(viewport={"width": size[0], "height": size[1]}, color_scheme=colours)

        def answer(route: Any) -> None:
            address = route.request.url.partition("#")[0].partition("?")[0]
            file = site / address.removeprefix(f"{HOST}/")
            if not address.startswith(HOST):
                outside.append(f"{page.url} -> {address}")
                route.abort()
            else:
                route.fulfill(path=file) if file.is_file() else route.fulfill(status=404)

        page.route("**/*", answer)
        yield page, outside
        page.unroute_all(behavior="ignoreErrors")
        browser.close()


def visit(site: Path, files: list[Path]) -> Visit:
    """Show these pages of a built site to Chromium, 1,440 pixels wide."""
    timeout, said = pytest.importorskip("playwright.sync_api").TimeoutError, Visit()
    with opened(site) as (page, said.outside):
        for file in files:
            page.goto(address(site, file))
            with contextlib.suppress(timeout):
                page.wait_for_function(f"{DRAWN} >= {num_diagrams(file)}", timeout=5000)
            found = {"diagrams": page.evaluate(DRAWN), "cut": page.evaluate(CUT), "no alt": page.evaluate(NO_ALT)}
            said.seen.append({"path": f"/{file.relative_to(site).as_posix()}", **found})
    return said


def address(site: Path, file: Path) -> str:
    return f"{HOST}/{file.relative_to(site).as_posix()}"


def num_diagrams(file: Path) -> int:
    """How many diagrams the page has, as built."""
    return file.read_text("utf-8").count('<pre class="mermaid">')
