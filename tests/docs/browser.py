"""The built book in a real browser: what each page asked for elsewhere, which diagrams it drew, which code it cut off."""

from __future__ import annotations

import contextlib
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
HOST = "http://book.test"
# A drawn diagram is a <div class="mermaid"> in the place of the <pre>; what is inside it no script can see, but its height.
DRAWN = "[...document.querySelectorAll('div.mermaid')].filter(diagram => diagram.clientHeight > 40).length"
CUT = """[...document.querySelectorAll('pre > code')].filter(code => code.scrollWidth > code.clientWidth + 1)
    .map(code => code.innerText)"""


@dataclass(slots=True)
class Visit:
    """What the browser saw."""

    seen: list[dict[str, Any]] = field(default_factory=list)  # of each page: path, diagrams, the code that is cut off
    outside: list[str] = field(default_factory=list)  # page -> address


def visit(site: Path, files: list[Path]) -> Visit:
    """Show these pages of a built site to Chromium, 1,440 pixels wide. It gets the site's files and nothing else."""
    playwright = pytest.importorskip("playwright.sync_api", reason="needs Playwright: pip install -e '.[dev]'")
    said = Visit()
    with playwright.sync_playwright() as driver:
        flags = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking"]
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=flags)
        page = browser.new_page(viewport={"width": 1440, "height": 1200})

        def answer(route: Any) -> None:
            address = route.request.url.partition("#")[0].partition("?")[0]
            file = site / address.removeprefix(f"{HOST}/")
            if not address.startswith(HOST):
                said.outside.append(f"{page.url} -> {address}")
                route.abort()
            else:
                route.fulfill(path=file) if file.is_file() else route.fulfill(status=404)

        page.route("**/*", answer)
        for file in files:
            path = f"/{file.relative_to(site).as_posix()}"
            page.goto(HOST + path)
            with contextlib.suppress(playwright.TimeoutError):
                page.wait_for_function(f"{DRAWN} >= {num_diagrams(file)}", timeout=5000)
            said.seen.append({"path": path, "diagrams": page.evaluate(DRAWN), "cut": page.evaluate(CUT)})
        browser.close()
    return said


def num_diagrams(file: Path) -> int:
    """How many diagrams the page has, as built."""
    return file.read_text("utf-8").count('<pre class="mermaid">')
