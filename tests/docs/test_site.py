"""The built book needs nobody else: no request to anywhere, every diagram is drawn, no comment is cut off."""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import pytest

from milestones.manifest import Course
from tests.docs import browser
from tests.docs.blocks import ROOT

NOT_TRANSLATED = "本页还没有中文版"  # the English page, looked at once
SCREEN = 780  # pixels that a diagram may be high: those of a screen, 1,440 x 900, below the head
COLUMNS = 120  # of code, that a page shows at a width of 1,440 pixels
WORDS = {  # word: the chapter that is about it
    "": {
        "speculative decoding": "/x3_speculation/",
        "quantization": "/x2_fewer_bits/",
        "paged kv cache": "/3_paged_kv/",
    },
    "zh/": {
        "投机解码": "/zh/x3_speculation/",
        "量化": "/zh/x2_fewer_bits/",
        "连续批处理": "/zh/2_continuous_batching/",
        "混合专家": "/zh/x4_experts/",
        "prefix caching": "/zh/map/",
    },
}
FETCHED = dict.fromkeys(("script", "img", "iframe", "source", "video"), "src") | {"link": "href", "object": "data"}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for module in ("mkdocs", "mkdocs_static_i18n", "jieba"):
        pytest.importorskip(module, reason="needs what builds the book: pip install -e '.[docs]'")
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


@pytest.mark.slow
def test_no_page_names_an_address_to_fetch(site: Path) -> None:
    fetched = [
        (file, address) for file in site.rglob("*.html") for address in Fetched(file.read_text("utf-8")).addresses
    ]
    assert [(file, address) for file, address in fetched if re.match(r"(\w+:)?//", address)] == []
    styles = {file: file.read_text("utf-8") for file in site.rglob("*.css")}
    assert not [file for file, style in styles.items() if re.search(r"(url\(|@import)\s*['\"]?(https?:)?//", style)]


@pytest.mark.slow
def test_a_recording_is_one_file_and_has_a_picture_for_paper(site: Path) -> None:
    shown = {}
    for file in site.rglob("*.html"):
        for frame in re.findall(r'<div class="recording">(.*?)</div>', file.read_text("utf-8"), re.DOTALL):
            page, picture = (file.parent / address.split("#")[0] for address in Fetched(frame).addresses if address)
            assert picture.is_file(), "make screenshots"
            shown[str(file.parent.relative_to(site))] = page.read_text("utf-8").count(
                '"format\\":\\"folovllm recording'
            )
    english = {
        ".": 1,
        "1_offline_inference": 1,
        "2_continuous_batching": 2,
        "3_paged_kv": 2,
        "6_speed_and_scale": 1,
        "x3_speculation": 1,
        "x3_heads": 1,
        "inspector": 6,
    }
    assert shown == {**english, **{str(Path("zh", page)): count for page, count in english.items()}}


@pytest.mark.slow
def test_the_chinese_edition(site: Path) -> None:
    """Its pages know their language and the English page, and its headings have the English anchors."""
    page = (site / "zh/troubleshooting/index.html").read_text("utf-8")
    assert '<html lang="zh"' in page and '<h1 id="troubleshooting">常见问题' in page and "<!-- source" not in page
    assert 'href="../../troubleshooting/" hreflang="en"' in page and NOT_TRANSLATED not in page
    lanes = re.findall(r'src="([^"]*abc_m3\.zh\.svg)"', (site / "zh/3_paged_kv/index.html").read_text("utf-8"))
    assert [">排队<" in (site / "zh/3_paged_kv" / picture).read_text("utf-8") for picture in lanes] == [True]
    assert NOT_TRANSLATED in (site / "zh/reference/api/index.html").read_text("utf-8")
    english, chinese = (
        json.loads((site / home / "search/search_index.json").read_text("utf-8"))["docs"] for home in ("", "zh")
    )
    assert not [entry for entry in english if entry["location"].startswith("zh/")]
    places = [entry["location"] for entry in chinese if "\u200b" in entry["text"]]
    assert any(place.startswith("troubleshooting/") for place in places)
    assert not [entry for entry in chinese if entry["location"].startswith("reference/api/")]


@pytest.mark.slow
def test_an_address_that_does_not_exist(site: Path) -> None:
    """One page in both languages, whose links lead somewhere from any folder."""
    page = (site / "404.html").read_text("utf-8")
    assert '<html lang="en"' in page and 'rel="alternate"' not in page and not (site / "sitemap.xml").exists()
    links = re.findall(r'<li><a href="/([^"]+)"', page)
    assert [link for link in links if not (site / link).exists()] == []
    assert sum(link.startswith("zh/") for link in links) == len(links) / 2 > 3


def test_the_overview_leads_to_chapters() -> None:
    drawing = (ROOT / "docs/assets/overview.svg").read_text("utf-8")
    badges = re.findall(r'<a class="badge" href="([^"]+)">.*?>([MX]\d)</text></a>', drawing)
    assert len(badges) == drawing.count("<a ")
    assert {name for _, name in badges} <= {m.id.upper() for m in Course(ROOT).milestones}
    assert [page for page, _ in badges if not (ROOT / "docs" / page).is_file()] == []


def test_the_words_of_pictures_are_translated(monkeypatch: pytest.MonkeyPatch) -> None:
    """All but the example's tokens."""
    monkeypatch.syspath_prepend(str(ROOT / "docs/_tools"))
    chinese = importlib.import_module("editions").chinese_picture
    drawn = [file for stem in ("abc", "x4_batch", "x4_load", "m6") for file in (ROOT / "docs/img").glob(f"{stem}*.svg")]
    assert len(drawn) > 10
    for file in (*drawn, ROOT / "docs/assets/overview.svg"):
        left = re.findall(r"<(?:text|title)[^>]*>([^<]*[a-z]{2}[^<]*)</", chinese(file.read_text("utf-8")))
        english = [
            text for text in left if text.isascii() and not re.fullmatch(r"[ABC]\d+ .*|LLM\.generate|token id", text)
        ]
        assert english == [], file.name


def test_a_stale_section_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mkdocs", reason="needs what builds the book: pip install -e '.[docs]'")
    monkeypatch.syspath_prepend(str(ROOT / "docs/_tools"))
    hooks = importlib.import_module("hooks")
    (tmp_path / "a.md").write_text("# Waste\n\nNew.\n\n## More\n\nText.\n", "utf-8")
    more = hashlib.sha256(b"## More Text.").hexdigest()[:12]
    chinese = (
        f"<!-- source: waste 0123456789ab -->\n# 浪费\n\n旧。\n\n<!-- source: more {more} -->\n## 更多\n\n文本。\n"
    )
    (tmp_path / "a.zh.md").write_text(chinese, "utf-8")
    where = {"abs_src_path": str(tmp_path / "a.zh.md"), "dest_uri": "zh/a/index.html"}
    file = SimpleNamespace(name="a", localization="zh", locale_alternate_of="zh", **where)
    shown = hooks.on_page_markdown(chinese, SimpleNamespace(file=file, url="zh/a/"))
    assert shown.startswith('# 浪费 { #waste }\n\n<div class="banner">本节的英文原文已有改动')
    assert (
        '<a href="../../a/#waste">' in shown and shown.count("banner") == 1 and "## 更多 { #more }\n\n文本。" in shown
    )


@pytest.mark.slow
def test_rows_of_the_map_lead_to_their_line(site: Path) -> None:
    page = (site / "zh/map/index.html").read_text("utf-8")
    rows = re.findall(r'<code>([\w.]+)</code></td>\s*<td[^>]*>[^\n]*</td>\s*<td[^>]*><a href="([^"#]+)#L-(\d+)"', page)
    assert len(rows) == page.count(".py.html#L-") > 60
    for name, address, line in rows:
        source = (site / "zh/map" / address).read_text("utf-8")
        at = re.search(rf'id="L-{line}" name="L-{line}".*', source)
        assert at and re.search(rf"\b{name.split('.')[-1]}\b", re.sub(r"<[^>]+>", "", at[0])), name


@pytest.mark.slow
def test_an_exercise_is_a_card(site: Path) -> None:
    for home, minutes in ("", "about 25 minutes"), ("zh/", "约 25 分钟"):
        page = (site / home / "3_paged_kv/index.html").read_text("utf-8")
        cards = re.findall(r'<div class="exercise">.*?</div>', page, re.DOTALL)
        assert len(cards) == 6 and minutes in cards[0] and "python -m milestones hint m3.1" in cards[0]


@pytest.fixture(scope="module")
def book(site: Path) -> Iterator[browser.Book]:
    with browser.running(site) as book:
        yield book


@pytest.mark.slow
@pytest.mark.skipif(browser.CHROMIUM is None, reason="needs a browser: apt-get install chromium")
class TestInABrowser:
    @pytest.mark.timeout(900)
    def test_every_page(self, book: browser.Book, site: Path) -> None:
        """It asks nobody else, draws its diagrams, cuts off no comment, and a phone does not scroll it sideways."""
        files = {file.relative_to(site).as_posix(): file for file in sorted(site.rglob("*.html"))}
        files = {
            name: file
            for name, file in files.items()
            if NOT_TRANSLATED not in file.read_text("utf-8") and not name.startswith("assets/source/")
        }
        with browser.opened(book) as (page, outside):
            said = {name: browser.visit(page, file, name) for name, file in files.items()}
        assert outside == [], "a page asks somebody else, or for what is not there"
        for name, seen in said.items():
            assert seen.diagrams == browser.num_diagrams(files[name]), name
            assert seen.tallest <= SCREEN, f"{name} has a diagram of {seen.tallest} pixels"
            assert seen.no_alt == [], f"{name}: a picture has no alt text"
            is_inspector = name.startswith("assets/")  # tests/inspector looks at it on a phone
            assert is_inspector or seen.too_wide <= 0, f"a phone scrolls {name} sideways"
            for code in seen.cut:
                longest = max(code.splitlines(), key=len)
                assert len(longest) > COLUMNS, f"{name} cuts off a line of {len(longest)} columns: {longest}"

    @pytest.mark.parametrize("colours", ["light", "dark"])
    def test_every_text_stands_out(self, book: browser.Book, colours: str) -> None:
        """Contrast of 4.5 to 1, large letters 3 to 1 (WCAG 2, level AA)."""
        with browser.opened(book, colours) as (page, _):
            for name in ("", "3_paged_kv/", "x2_fewer_bits/", "performance/", "reference/api/", "reference/cli/"):
                page.goto(f"{name}index.html")
                assert page.evaluate(browser.FAINT) == [], name or "front page"

    @pytest.mark.parametrize("home", ["", "zh/"])
    def test_the_first_screen(self, book: browser.Book, home: str) -> None:
        """Two buttons and the engine at work; a wide table is cards on a phone."""
        with browser.opened(book) as (page, _):
            for size in ({"width": 1440, "height": 900}, {"width": 390, "height": 844}):
                page.set_viewport_size(size)
                page.goto(f"{home}index.html")
                cells = page.locator(".recording iframe").content_frame.locator("canvas.cells")
                cells.wait_for()
                for seen in (*page.locator(".hero-words a").all(), cells):
                    box = seen.bounding_box()
                    assert box and box["y"] >= 0 and box["y"] + box["height"] <= size["height"], f"{size}: {box}"
                assert page.locator(".hero-words a").count() == 2
                row = page.locator(".cards tbody tr").first
                assert row.evaluate("row => getComputedStyle(row).display") == (
                    "block" if size["width"] < 400 else "table-row"
                )

    @pytest.mark.parametrize("page_name", ["3_paged_kv", "zh/5_reuse", "x3_speculation"])
    def test_a_table_to_touch(self, book: browser.Book, page_name: str) -> None:
        """By keyboard; what is said is what the table says, which is there without a script."""
        with browser.opened(book) as (page, _):
            page.goto(f"{page_name}/index.html")
            touch = page.locator(".touch")
            cells = touch.locator("tbody tr").nth(2).locator("td").all_text_contents()
            row = touch.locator("input").first
            row.focus()
            for key in ("Home", "ArrowRight", "ArrowRight"):
                page.keyboard.press(key)
            assert row.get_attribute("aria-valuetext") == cells[0]
            said = touch.locator(".touch-said b").all_text_contents()
            assert said == ([cells[2]] if touch.locator("input").count() == 2 else cells[1:])
            assert touch.locator(".touch-bars .chosen").count() == len(said)

    @pytest.mark.parametrize("page_name", ["3_paged_kv", "zh/3_paged_kv"])
    def test_a_section_to_skip_at_first(self, book: browser.Book, page_name: str) -> None:
        """It is closed; a link to its heading opens it, and paper shows it. A search finds its text."""
        seen = "document.querySelector('#copy-on-write').closest('details').querySelector('p').checkVisibility({contentVisibilityAuto: true})"
        with browser.opened(book) as (page, _):
            page.goto(f"{page_name}/index.html")
            assert page.locator("details.skip").count() == 8 and page.locator("details.skip[open]").count() == 0
            assert not page.evaluate(seen)
            page.emulate_media(media="print")
            assert page.evaluate(seen)
            page.emulate_media(media="screen")
            page.locator(".md-nav--secondary a[href='#copy-on-write']").first.evaluate("link => link.click()")
            page.locator("details.skip[open] #copy-on-write").wait_for()
            assert page.evaluate(seen)
            home = page_name.removesuffix("3_paged_kv")
            index = page.request.get(f"{book.address}{home}search/search_index.json").json()["docs"]
            assert [e["text"] for e in index if e["location"] == "3_paged_kv/#copy-on-write" and "fork()" in e["text"]]

    def test_colours_can_be_switched(self, book: browser.Book) -> None:
        """The recording on the page follows, and the choice is kept."""
        scheme = "document.body.dataset.mdColorScheme"
        with browser.opened(book) as (page, _):
            page.goto("index.html")
            assert page.evaluate(scheme) == "default"
            page.get_by_title("Dark colours").click()
            page.reload()
            assert page.evaluate(scheme) == "slate", "the choice is forgotten"
            frame = page.locator(".recording iframe")
            frame.scroll_into_view_if_needed()
            assert frame.content_frame.locator("html").get_attribute("data-theme") == "dark"

    def test_a_keyboard_reaches_text_navigation_and_cards(self, book: browser.Book) -> None:
        """The first stop leads past the navigation, each stop shows where it is, and a question opens with Enter."""
        with browser.opened(book) as (page, _):
            page.goto("3_paged_kv/index.html")
            page.keyboard.press("Tab")
            assert page.evaluate(browser.FOCUSED) == ["Skip to content", True]
            seen = []
            for _ in range(30):
                page.keyboard.press("Tab")
                name, is_marked = page.evaluate(browser.FOCUSED)
                assert is_marked, f"focus on {name!r} cannot be seen"
                seen.append(name)
            assert "M4 Attention kernels" in seen
            card = page.locator("summary").first
            card.focus()
            page.keyboard.press("Enter")
            assert card.evaluate("card => card.parentElement.open")

    @pytest.mark.parametrize("home", ["", "zh/"])
    def test_search_finds_the_chapter_by_the_fields_word(self, book: browser.Book, home: str) -> None:
        """The index is worked out once: so one page is asked for all words of its language."""
        with browser.opened(book, search=True) as (page, _):
            page.goto(f"{home}index.html")
            asked = page.locator("input.md-search__input")
            for word, chapter in WORDS[home].items():
                asked.fill("")
                asked.press("End")  # the page reads its field when a key comes up
                page.wait_for_function(f"!({browser.SEARCHED}).length")
                asked.fill(word)
                asked.press("End")
                page.wait_for_selector(".md-search-result__link")
                found = page.evaluate(browser.SEARCHED)
                assert chapter in found[:3], f"{word} finds {found[:5]}"
                assert {path.startswith("/zh/") for path in found} == {home == "zh/"}, "another language's pages"
                assert not page.locator(".md-search-result__terms:visible").count(), "a word is called missing"
