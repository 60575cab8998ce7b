"""What mkdocs does to the pages beside building them: the chapters' order, formulas, and diagrams.

The chapters stand in the navigation in the order of the manifests that name them, by number: milestones in the course, electives in a
part of their own. Formulas, `$x$` and `$$x$$`, become MathML: a browser draws them without a script. Diagrams have one, which comes with
the book: no page makes a request to anywhere else. The overview, `assets/overview.svg`, becomes a part of its page, so that it takes the
page's colours and language, and its badges lead to the chapters.
`<!-- recording NAME -->`, or two names for a race, becomes the inspector's page with these recordings of `assets/recordings/`, or with those of
the scene of that name; the picture behind it (`make screenshots`) is for paper, and for browsers without JavaScript.
The Chinese edition: a heading gets the anchor of the English one, which the mark above it names, and a section whose source has changed since,
or a page that has no translation, says so in a banner. Each language has a search index of its own, beside its first page.
What the pages take from the code is in them already (`excerpts.py`).
"""

from __future__ import annotations

import html
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

from mkdocs.plugins import event_priority
from mkdocs.utils import get_relative_url

sys.path[:0] = [str(Path(__file__).parent)]
from cards import exercise_cards, map_rows, table_cards, write_sources  # noqa: E402
from editions import COURSE, MARK, Pair, chinese_picture  # noqa: E402
from publish import fields  # noqa: E402

from folovllm.apps.inspector.page import STATIC, one_file  # noqa: E402
from folovllm.apps.inspector.scenes import scenes  # noqa: E402
from milestones.language import messages  # noqa: E402
from milestones.tasks import Milestone  # noqa: E402

ZH = "zh"
MERMAID = "assets/mermaid/mermaid.tiny.js"
DIAGRAM = re.compile(r'(<pre class="mermaid"><code>)(.*?</pre>)', re.DOTALL)
TIGHT = """%%{init: {"flowchart": {"rankSpacing": 16, "nodeSpacing": 24, "padding": 6, "wrappingWidth": 300,
"subGraphTitleMargin": {"top": 0, "bottom": 14}}, "class": {"hideEmptyMembersBox": true}, "sequence": {"mirrorActors": false, "messageMargin": 28}}}%%
"""  # on one screen
TOUCH = "assets/touch.js"
RECORDINGS = "assets/recordings"
OVERVIEW = re.compile(r'<p><img[^>]*src="[^"]*assets/overview\.svg"[^>]*></p>')
RECORDING = re.compile(r"<!-- recording (\w+)(?: (\w+))? -->\s*(<p><img[^>]*></p>)")
PICTURE = re.compile(r'(src="[^"]*img/(?:abc|x4|m6)_\w+)\.svg(?=")')  # with words
OVERVIEW_FILE = Path(__file__).parents[1] / "assets/overview.svg"
shown: set[tuple[str, ...]] = set()  # in this build
SCENES_PAGE = "inspector/"
ALTERNATE = re.compile(r'\s*<link rel="alternate" [^>]*>')
SKIPPED = re.compile(
    r"(<(h[2-4])\b(?:(?!<h\d).)*?</\2>)\s*<p><em>(Skip at first|第一次读可以跳过)[.。]</em></p>(.*?)(?=<h\d)", re.DOTALL
)
BASE = re.compile(r'(<script id="__config"[^>]*>\{.*?"base": "[^"]*)')
MORE = {"en": ("On a page of its own", "More scenes"), ZH: ("单独打开", "更多场景")}


def on_config(config: Any) -> Any:
    """Put the chapters that the manifests name into the navigation. One that is missing fails a strict build.

    This is called for each language.
    """
    published = fields()
    config.site_url = published["site"] or None
    config.repo_url = published["address"] or None
    parts = {title: pages for part in config.nav for title, pages in part.items()}
    for m in COURSE.milestones:
        chapter = {f"{m.id.upper()} {m.title}": Path(m.chapter).name}
        part = parts["Electives" if m.is_elective else "Course"]
        if m.chapter and chapter not in part:
            part.append(chapter)
            part += [{f"{m.id.upper()} {title}": Path(page).name} for page, title in _more(m)]
    said = messages(ZH)
    known = [(m.id.upper(), title) for m in COURSE.milestones for title in (m.title, *(title for _, title in _more(m)))]
    titles = {f"{id} {title}": f"{id} {said.get(title, title)}" for id, title in known}
    config.plugins["i18n"].get_language_config(ZH).nav_translations.update(said | titles)
    return config


def _more(m: Milestone) -> list[tuple[str, str]]:
    """The chapters beside a milestone's first one, each with the title in its heading, "X3. Draft heads" without the number."""
    firsts = [(page, (COURSE.root / page).read_text("utf-8").partition("\n")[0]) for page in m.more_chapters]
    return [(page, first.partition(". ")[2]) for page, first in firsts]


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """The front page has no navigation beside it; the Chinese edition has anchors and banners."""
    if page.file.name == "index":
        page.meta["hide"] = ["navigation", "toc"]
    if page.file.locale_alternate_of != ZH:
        return markdown
    english = page.file.dest_uri.removeprefix(f"{ZH}/").removesuffix("index.html")
    to_english = html.escape(get_relative_url(english, page.url))
    if page.file.localization != ZH:
        page.meta["search"] = {"exclude": True}  # the English edition has it
        banner = f'<div class="banner">本页还没有中文版，以下是<a href="{to_english}">英文版</a>。</div>\n\n'
        return banner + _without_symbols(markdown, to_english)
    target = Path(page.file.abs_src_path)
    states = Pair(target, target.with_name(page.file.name + ".md")).states()

    def heading(match: re.Match[str]) -> str:
        title = f"{match[3]} {{ #{match[1]} }}\n" if match[3] else ""
        if states[match[1]] == "current":
            return title
        link = f'<a href="{to_english}#{match[1]}">英文版</a>'
        return f'{title}\n<div class="banner">本节的英文原文已有改动，译文可能过时，请对照{link}。</div>\n\n'

    return _without_symbols(re.sub(MARK.pattern + r"(?:(#+ .*)\n)?", heading, markdown, flags=re.M), to_english)


def _without_symbols(markdown: str, to_english: str) -> str:
    """`::: module.symbol` and its options become a link: each symbol is described once on the site."""
    link = rf'<p><a href="{to_english}#\1"><code>\1</code></a></p>\n'
    return re.sub(r"^::: (\S+)\n(?:(?: {4}.*)?\n)*?(?=\S|\Z)", link, markdown, flags=re.M)


def on_page_content(content: str, page: Any, **_: Any) -> str:
    """Formulas to MathML, the overview and recordings into their pages, tables and exercises as cards, and the scripts that draws diagrams, or makes a table one to touch, to pages that have one.

    The theme would fetch that script from the web; it does not where `mermaid` is there already.
    """
    if '<pre class="mermaid">' in content:
        content = DIAGRAM.sub(_diagram, content)
        content += f'\n<script src="{get_relative_url(MERMAID, page.url)}"></script>'
    if '<div class="touch"' in content:
        content += f'\n<script src="{get_relative_url(TOUCH, page.url)}"></script>'
    content = RECORDING.sub(lambda match: _recording(match, page), content)
    content = OVERVIEW.sub(lambda _: _overview(page), content)
    language = ZH if page.file.locale_alternate_of == ZH else "en"
    if page.file.name.removesuffix(f".{ZH}") == "map":
        content = map_rows(content, page.url)
    content = exercise_cards(table_cards(content), language)
    if language == ZH:
        content = PICTURE.sub(r"\1.zh.svg", content)
    return re.sub(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', _formula, content, flags=re.DOTALL)


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """A section to skip at first is closed: its heading opens it, and so does a link to the heading. The index, made before, has its text.

    A Chinese page searches below `zh/`, where the pages of its index are. The theme would look for a sitemap beside each page in
    another language that a page names; the site's own sitemap names them all.
    """
    output = SKIPPED.sub(r'<details class="skip"><summary>\1<span>\3</span></summary>\4</details>', output)
    output = ALTERNATE.sub("", output)
    return BASE.sub(rf"\1/{ZH}/", output, count=1) if page.file.locale_alternate_of == ZH else output


def on_post_template(output: str, template_name: str, config: Any) -> str:
    """The page for an address that does not exist is in both languages; the navigation around it is English."""
    is_second = config.plugins["i18n"].current_language == ZH
    return "" if template_name == "404.html" and is_second else ALTERNATE.sub("", output)


@event_priority(-101)  # after the languages are built, and their indices one
def on_post_build(config: Any) -> None:
    """Write what the pages of both languages need, once."""
    if config.plugins["i18n"].building:
        return
    _write_recordings(config)
    _split_index(Path(config.site_dir))
    write_sources(Path(config.site_dir))
    shutil.copy(STATIC / "house.css", Path(config.site_dir, "assets"))
    if not config.site_url:  # a sitemap names whole addresses
        for name in ("sitemap.xml", "sitemap.xml.gz"):
            Path(config.site_dir, name).unlink()


def _split_index(site: Path) -> None:
    file = site / "search/search_index.json"
    index = json.loads(file.read_text("utf-8"))
    english: list[Any] = []
    chinese: list[Any] = []
    for entry in index["docs"]:
        place = entry["location"].removeprefix(f"{ZH}/")
        (english if place == entry["location"] else chinese).append({**entry, "location": place})
    for folder, docs, languages in (site, english, ["en"]), (site / ZH, chinese, ["en", ZH]):
        written = {"config": {**index["config"], "lang": languages}, "docs": docs}
        (folder / "search").mkdir(exist_ok=True)
        (folder / "search" / file.name).write_text(json.dumps(written, separators=(",", ":")), "utf-8")


def _write_recordings(config: Any) -> None:
    """Write the pages with recordings, each one file that works from disk, too; and the pictures in Chinese."""
    folder = Path(config.site_dir, RECORDINGS)
    for names in shown:
        scene = scenes().get(names[0])
        files = [folder / f"{name}.jsonl" for name in names] if scene is None else scene.files
        one_file(files, folder / f"{'+'.join(names)}.html", book="../../{}/")
    for picture in (OVERVIEW_FILE.parents[1] / "img").glob("*.svg"):
        if PICTURE.match(f'src="img/{picture.name}"'):
            chinese = chinese_picture(picture.read_text("utf-8"))
            Path(config.site_dir, "img", f"{picture.stem}.zh.svg").write_text(chinese, "utf-8")


def _recording(match: re.Match[str], page: Any) -> str:
    """The frame, its picture, and below them the way to the whole page, and from a chapter to the other scenes."""
    names = tuple(filter(None, match.groups()[:2]))
    shown.add(names)
    address = get_relative_url(f"{RECORDINGS}/{'+'.join(names)}.html", page.url)
    language = ZH if page.url.startswith(f"{ZH}/") else "en"
    title = "what the engine did, step by step; the text describes it"
    frame = f'<iframe src="{address}#embed&amp;lang={language}" loading="lazy" title="{title}"></iframe>'
    prefix = f"{ZH}/" if language == ZH else ""
    scenes_page = get_relative_url(prefix + SCENES_PAGE, page.url)
    alone, more = MORE[language]
    links = [f'<a href="{address}#lang={language}">{alone}</a>']
    if page.url != prefix + SCENES_PAGE:
        links.append(f'<a href="{scenes_page}">{more}</a>')
    return f'<div class="recording">{frame}{match[3]}</div>\n<div class="under-recording">{" · ".join(links)}</div>'


def _diagram(match: re.Match[str]) -> str:
    """One that does not run sideways is on one screen; what runs sideways scrolls in a frame of its own on a phone."""
    start, rest = match.groups()
    tight = start + rest if rest.startswith(("flowchart LR", "stateDiagram")) else start + html.escape(TIGHT) + rest
    return (
        tight
        if rest.startswith("flowchart T") and "direction LR" not in rest
        else f'<div class="wide-diagram">{tight}</div>'
    )


def _overview(page: Any) -> str:
    """The drawing in the page's language; its links lead to the pages of that language."""
    drawing, home = re.sub(r"<!--.*?-->", "", OVERVIEW_FILE.read_text("utf-8")), ""
    if page.file.locale_alternate_of == ZH:
        drawing, home = chinese_picture(drawing), f"{ZH}/"

    def link(match: re.Match[str]) -> str:
        return f'href="{get_relative_url(f"{home}{match[1]}/", page.url)}"'

    linked = re.sub(r'href="(\w+)\.md"', link, drawing)
    return f'<div class="drawing" tabindex="0">{linked}</div>'


def _formula(match: re.Match[str]) -> str:
    from latex2mathml.converter import convert

    display = "block" if match[1] == "div" else "inline"
    return str(convert(html.unescape(match[2]), display=display))
