"""The built book needs nobody else: no request to anywhere, every diagram is drawn, no comment is cut off."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.docs import browser
from tests.docs.blocks import ROOT

COLUMNS = 120  # of code, that a page shows at a width of 1,440 pixels
FETCHED = {
    "script": "src",
    "img": "src",
    "link": "href",
    "iframe": "src",
    "source": "src",
    "video": "src",
    "object": "data",
}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("mkdocs", reason="needs what builds the book: pip install -e '.[docs]'")
    out = tmp_path_factory.mktemp("site")
    # Not --quiet: mkdocs would no longer count the warnings that --strict turns into errors.
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(out)]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


class Fetched(HTMLParser):
    """Collects the addresses that a page fetches by itself. What a reader may click on is no matter."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if tag != "link" or values.get("rel") not in ("canonical", "prev", "next", "edit", "alternate"):
            self.addresses.append(values.get(FETCHED.get(tag, "")) or "")


def test_what_counts_as_fetched() -> None:
    html = '<a href="https://a.b"></a><script src="//x.y/z.js"></script><link rel="prev" href="https://q"><img src="i.png">'
    assert list(filter(None, Fetched(html).addresses)) == ["//x.y/z.js", "i.png"]


def test_no_page_names_an_address_to_fetch(site: Path) -> None:
    outside = [
        f"{file.relative_to(site)}: {address}"
        for file in site.rglob("*.html")
        for address in Fetched(file.read_text("utf-8")).addresses
        if re.match(r"(\w+:)?//", address)
    ]
    assert outside == []
    assert not [
        file
        for file in site.rglob("*.css")
        if re.search(r"(url\(|@import)\s*['\"]?(https?:)?//", file.read_text("utf-8"))
    ]


def test_a_page_with_a_diagram_has_the_script_that_draws_it(site: Path) -> None:
    with_diagrams = [file for file in site.rglob("*.html") if browser.num_diagrams(file)]
    assert with_diagrams
    for file in with_diagrams:
        scripts = [
            file.parent / address for address in Fetched(file.read_text("utf-8")).addresses if "mermaid" in address
        ]
        assert [script.resolve().is_file() for script in scripts] == [True], file


def test_a_recording_is_one_file_and_has_a_picture_for_paper(site: Path) -> None:
    shown = {}
    for file in site.rglob("*.html"):
        for frame in re.findall(r'<div class="recording">(.*?)</div>', file.read_text("utf-8"), re.DOTALL):
            page, picture = (file.parent / address.split("#")[0] for address in Fetched(frame).addresses if address)
            assert picture.is_file(), "make screenshots"
            shown[file.parent.name] = page.read_text("utf-8").count('"format\\":\\"folovllm recording')
    first_page = site.name
    assert shown == {first_page: 1, "2_continuous_batching": 2, "3_paged_kv": 2, "6_speed_and_scale": 1}


@pytest.mark.skipif(browser.CHROMIUM is None, reason="needs a browser: apt-get install chromium")
def test_in_a_browser(site: Path) -> None:
    said = browser.visit(site)
    assert said.outside == [], "a page asks somebody else"
    diagrams = {page["path"]: page["diagrams"] for page in said.seen}
    assert diagrams == {f"/{file.relative_to(site)}": browser.num_diagrams(file) for file in site.rglob("*.html")}
    for page in said.seen:
        for code in page["cut"]:
            longest = max(code.splitlines(), key=len)
            assert len(longest) > COLUMNS, f"{page['path']} cuts off a line of {len(longest)} columns: {longest}"
