"""What mkdocs does to the pages beside building them: the chapters' order, formulas, and diagrams.

The chapters stand in the navigation in the order of the manifests that name them. Formulas, `$x$` and `$$x$$`, become MathML: a browser
draws them without a script. Diagrams have one, which comes with the book: no page makes a request to anywhere else.
`<!-- recording NAME -->`, or two names for a race, becomes the inspector's page with these recordings of `assets/recordings/`, or with those of
the scene of that name; the picture behind it (`make screenshots`) is for paper, and for browsers without JavaScript.
The Chinese edition: a heading gets the anchor of the English one, which the mark above it names, and a section whose source has changed since,
or a page that has no translation, says so in a banner.
What the pages take from the code is in them already (`excerpts.py`).
"""

from __future__ import annotations

import html
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.utils import get_relative_url

sys.path[:0] = [str(Path(__file__).parent)]
from editions import COURSE, MARK, Pair  # noqa: E402

from folovllm.inspector.page import one_file  # noqa: E402
from folovllm.inspector.scenes import scenes  # noqa: E402
from milestones.language import messages  # noqa: E402

ZH = "zh"
MERMAID = "assets/mermaid/mermaid.tiny.js"
RECORDINGS = "assets/recordings"
RECORDING = re.compile(r"<!-- recording (\w+)(?: (\w+))? -->\s*(<p><img[^>]*></p>)")
shown: set[tuple[str, ...]] = set()  # in this build
SCENES_PAGE = "inspector/"
MORE = {"en": ("On a page of its own", "More scenes"), ZH: ("单独打开", "更多场景")}


def on_config(config: Any) -> Any:
    """Put the chapters that the manifests name after chapter 0. One that is missing fails a strict build.

    This is called for each language.
    """
    chapters = [{m.title: Path(m.chapter).name} for m in COURSE.milestones if m.chapter]
    if chapters[0] not in config.nav:
        config.nav[2:2] = chapters
        config.plugins["i18n"].get_language_config(ZH).nav_translations.update(messages(ZH))
    return config


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Of the Chinese edition: anchors and banners."""
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

    return re.sub(MARK.pattern + r"(?:(#+ .*)\n)?", heading, markdown, flags=re.M)


def _without_symbols(markdown: str, to_english: str) -> str:
    """`::: module.symbol` and its options become a link: each symbol is described once on the site."""
    link = rf'<p><a href="{to_english}#\1"><code>\1</code></a></p>\n'
    return re.sub(r"^::: (\S+)\n(?:(?: {4}.*)?\n)*?(?=\S|\Z)", link, markdown, flags=re.M)


def on_page_content(content: str, page: Any, **_: Any) -> str:
    """Formulas to MathML, and the script that draws diagrams to pages that have one.

    The theme would fetch that script from the web; it does not where `mermaid` is there already.
    """
    if '<pre class="mermaid">' in content:
        content += f'\n<script src="{get_relative_url(MERMAID, page.url)}"></script>'
    content = RECORDING.sub(lambda match: _recording(match, page), content)
    return re.sub(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', _formula, content, flags=re.DOTALL)


def on_post_build(config: Any) -> None:
    """Write the pages with recordings: each is one file, and works from disk, too."""
    folder = Path(config.site_dir, RECORDINGS)
    for names in shown:
        scene = scenes().get(names[0])
        files = [folder / f"{name}.jsonl" for name in names] if scene is None else scene.files
        one_file(files, folder / f"{'+'.join(names)}.html", book="../../{}/")


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


def _formula(match: re.Match[str]) -> str:
    from latex2mathml.converter import convert

    display = "block" if match[1] == "div" else "inline"
    return str(convert(html.unescape(match[2]), display=display))
