"""What mkdocs does to the pages beside building them: the chapters' order, formulas, and diagrams.

The chapters stand in the navigation in the order of the manifests that name them. Formulas, `$x$` and `$$x$$`, become MathML: a browser
draws them without a script. Diagrams have one, which comes with the book: no page makes a request to anywhere else.
What the pages take from the code is in them already (`excerpts.py`).
"""

from __future__ import annotations

import html
import re
from pathlib import Path
from typing import Any

from mkdocs.utils import get_relative_url

from milestones.manifest import Course

COURSE = Course(Path(__file__).resolve().parents[2])
MERMAID = "assets/mermaid/mermaid.tiny.js"


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
    return re.sub(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', _formula, content, flags=re.DOTALL)


def _formula(match: re.Match[str]) -> str:
    from latex2mathml.converter import convert

    display = "block" if match[1] == "div" else "inline"
    return str(convert(html.unescape(match[2]), display=display))
