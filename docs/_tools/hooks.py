"""What mkdocs does to the pages beside building them: the chapters' order, formulas, and diagrams.

The chapters stand in the navigation in the order of the manifests that name them. Formulas, `$x$` and `$$x$$`, become MathML: a browser
draws them without a script. Diagrams have one, which comes with the book: no page makes a request to anywhere else.
`<!-- recording NAME -->`, or two names for a race, becomes the inspector's page with these recordings of `assets/recordings/`; the picture
behind it (`make screenshots`) is for paper, and for readers of the text.
What the pages take from the code is in them already (`excerpts.py`).
"""

from __future__ import annotations

import html
import re
from pathlib import Path
from typing import Any

from mkdocs.utils import get_relative_url

from folovllm.inspector.page import one_file
from milestones.manifest import Course

COURSE = Course(Path(__file__).resolve().parents[2])
MERMAID = "assets/mermaid/mermaid.tiny.js"
RECORDINGS = "assets/recordings"
RECORDING = re.compile(r"<!-- recording (\w+)(?: (\w+))? -->\s*(<p><img[^>]*></p>)")
shown: set[tuple[str, ...]] = set()  # in this build


def on_config(config: Any) -> Any:
    """Put the chapters that the manifests name after chapter 0. One that is missing fails a strict build."""
    config.nav[2:2] = [{m.title: Path(m.chapter).name} for m in COURSE.milestones if m.chapter]
    return config


def on_page_content(content: str, page: Any, **_: Any) -> str:
    """Formulas to MathML, and the script that draws diagrams to pages that have one.

    The theme would fetch that script from the web; it does not where `mermaid` is there already.
    """
    if '<pre class="mermaid">' in content:
        content += f'\n<script src="{get_relative_url(MERMAID, page.url)}"></script>'
    content = RECORDING.sub(lambda match: _recording(match, page.url), content)
    return re.sub(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', _formula, content, flags=re.DOTALL)


def on_post_build(config: Any) -> None:
    """Write the pages with recordings: each is one file, and works from disk, too."""
    folder = Path(config.site_dir, RECORDINGS)
    for names in shown:
        one_file([folder / f"{name}.jsonl" for name in names], folder / f"{'+'.join(names)}.html")


def _recording(match: re.Match[str], url: str) -> str:
    names = tuple(filter(None, match.groups()[:2]))
    shown.add(names)
    address = get_relative_url(f"{RECORDINGS}/{'+'.join(names)}.html", url)
    title = "what the engine did, step by step; the text describes it"
    frame = f'<iframe src="{address}#embed" loading="lazy" title="{title}"></iframe>'
    return f'<div class="recording">{frame}{match[3]}</div>'


def _formula(match: re.Match[str]) -> str:
    from latex2mathml.converter import convert

    display = "block" if match[1] == "div" else "inline"
    return str(convert(html.unescape(match[2]), display=display))
