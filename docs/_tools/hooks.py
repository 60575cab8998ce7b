"""What mkdocs does to the pages beside building them: the chapters' order, and formulas.

The chapters stand in the navigation in the order of the manifests that name them. Formulas, `$x$` and `$$x$$`, become MathML: a browser
draws them without a script. What the pages take from the code is in them already (`excerpts.py`).
"""

from __future__ import annotations

import html
import re
from pathlib import Path
from typing import Any

from milestones.manifest import Course

COURSE = Course(Path(__file__).resolve().parents[2])


def on_config(config: Any) -> Any:
    """Put the chapters that the manifests name after the first page. One that is missing fails a strict build."""
    config.nav[1:1] = [{m.title: Path(m.chapter).name} for m in COURSE.milestones if m.chapter]
    return config


def on_page_content(content: str, **_: Any) -> str:
    """Formulas to MathML."""
    return re.sub(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', _formula, content, flags=re.DOTALL)


def _formula(match: re.Match[str]) -> str:
    from latex2mathml.converter import convert

    display = "block" if match[1] == "div" else "inline"
    return str(convert(html.unescape(match[2]), display=display))
