"""What a translation has like its source: code, links, exercises, names, formulas and numbers. See `editions.py`."""

from __future__ import annotations

import re
from functools import cache

from markdown_it import MarkdownIt

FILLED_IN = re.compile(
    r"^(<!-- (?:code|signature|flags|symbols|milestones|computed|files)\b.*? -->)$.*?^<!-- end(?: of files)? -->$",
    re.MULTILINE | re.DOTALL,
)
TO_RUN = re.compile(r"^<!-- *(?:no-run|before):.*?-->\n", re.M | re.S)  # tests/docs/blocks.py: not in a translation
CODE = re.compile(r"`+([^`]+)`+")
FORMULA = re.compile(r"\$\$.*?\$\$|(?<![\w$])\$[^$]+\$", re.S)
EXERCISE = re.compile(r"(?<![A-Za-z0-9_.])[mx]\d\.\d+(?![A-Za-z0-9_])")
UNITS = r"%|[KMGT]i?B(?:/s)?|[mµn]?s|T?FLOPs?(?:/s)?|[KMG]?Hz|W"
QUANTITY = re.compile(rf"(?<![A-Za-z0-9_.,-])(\d[\d,]*(?:\.\d+)*)(?: ?({UNITS})(?![A-Za-z0-9]))?(?![A-Za-z0-9_])")
LARGE = {"billion": 10**9, "million": 10**6, "M": 10**6, "亿": 10**8, "万": 10**4}  # 4.0 billion or 4.0-billion: 40 亿
COUNTED = re.compile(rf"(\d[\d,]*(?:\.\d+)?)[ -]?({'|'.join(LARGE)})(?![A-Za-z0-9])")
MONTHS = ["January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November", "December"]  # fmt: skip
MONTH = re.compile(rf"(?:(\d+) )?({'|'.join(MONTHS)}) (\d{{4}})")


def plain_text(text: str) -> str:
    """A section without what a tool fills in, and without how a test runs its commands."""
    return TO_RUN.sub("", FILLED_IN.sub(r"\1", text))


def differences(source: str, translation: str) -> list[str]:
    """A sentence for each kind of thing that the two have and that is not the same."""
    ours, theirs = facts(source), facts(translation)
    return [
        f"{kind}: the source has {_less(ours[kind], theirs[kind])}, the translation {_less(theirs[kind], ours[kind])}"
        for kind in ours
        if sorted(ours[kind]) != sorted(theirs[kind])
    ]


def _less(these: list[str], others: list[str]) -> str:
    """Those of `these` that are not in `others`, and the first few are enough."""
    rest = list(these)
    for other in others:
        if other in rest:
            rest.remove(other)
    return ", ".join(map(repr, rest[:4])) or "nothing else"


@cache
def facts(text: str) -> dict[str, list[str]]:
    """What a translation keeps. Comments in code may be translated, a diagram's words as well."""
    text = plain_text(text)
    tokens = MarkdownIt().enable("table").disable("code").parse(text)
    prose = "\n".join(_prose(token.content, token.type) for token in tokens if token.type in ("inline", "html_block"))
    inline = [child for token in tokens for child in token.children or ()]
    links = [str(child.attrs.get("href") or child.attrs.get("src") or "") for child in inline]
    uncoded = CODE.sub(" ", prose)
    plain = MONTH.sub(
        lambda m: f"{m[1] or ''} {MONTHS.index(m[2]) + 1} {m[3]}",
        FORMULA.sub(" ", uncoded).replace(" percent", "%"),
    )
    plain = re.sub(r"(?<=\d)(?:st|nd|rd|th)\b", "", plain)
    plain = COUNTED.sub(lambda m: f"{float(m[1].replace(',', '')) * LARGE[m[2]]:.0f}", plain)
    return {
        "code": [_code(token.info, token.content) for token in tokens if token.type == "fence"],
        "marks": re.findall(r"^<!-- (?!source:).*?-->", text, re.M | re.S),
        "links": [link.replace(".zh.md", ".md") for link in links if link],
        "exercises": list({*EXERCISE.findall(prose)}),
        "names in code": list({*(child.content for child in inline if child.type == "code_inline")}),
        "formulas": [re.sub(r"\\text\{[^}]*\}|\s|[.,;。，；]?\$", "", found) for found in FORMULA.findall(uncoded)],
        "quantities": [f"{n.replace(',', '')} {unit}".strip() for n, unit in QUANTITY.findall(plain)],
    }


def stray_stars(text: str) -> list[str]:
    """Pieces of text with a star that was meant as emphasis and is none."""
    plain = re.sub(r"\\\*| \* |_\*", " ", FORMULA.sub("", text))  # escaped, a product, FINISHED_*
    parsed = MarkdownIt().enable("table").parse(plain)
    found = (child.content for token in parsed for child in token.children or () if child.type == "text")
    return [content for content in found if re.search(r"\*\S|\S\*", content)]


def _prose(content: str, kind: str) -> str:
    """A paragraph without the addresses in it; of HTML, the text."""
    if kind == "html_block":
        return re.sub(r"<code>.*?</code>|<!--.*?-->|<[^>]*>", " ", content, flags=re.S)
    return re.sub(r"\]\([^)]*\)", "]", content).replace("\n", " ")


def _code(language: str, code: str) -> str:
    """Of a diagram the number of its lines; else the code without comments."""
    lines = code.splitlines()
    if language == "mermaid":
        return f"a diagram of {len(lines)} lines"
    return "\n".join([language, *(re.sub(r"(^|\s)\s*# .*", "", line).rstrip() for line in lines)])
