"""The inspector's page: as a server sends it, or as one file that has all in it and asks nobody for anything."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec

from folovllm.models.written_files import write_whole

STATIC = Path(__file__).parent / "static"
SERVED = "inspector/static/"  # the address of these files, as the page says it
STYLES = "house.css", "inspector.css"  # the first one is the chat page's and the book's, too
STYLE = "\n".join(f'<link rel="stylesheet" href="{name}">' for name in STYLES)
SOURCE = '<script type="application/json" id="source">null</script>'
STRINGS = '<script type="application/json" id="strings">null</script>'
SCRIPT = '<script type="module" src="main.js"></script>'
PLAIN = " !$&'()*+,/:;<=>?@[]^`{|}"  # stands in an address as it is: base64 would take a fifth more


def served_page(source: dict[str, Any]) -> str:
    """The page for a server that has the files of `static/` under `SERVED`."""
    return _fill(source, STYLE.replace('href="', f'href="{SERVED}'), SCRIPT.replace('src="', f'src="{SERVED}'))


def whole_page(source: dict[str, Any], in_english: bool = False) -> str:
    """The page with everything in it. Modules become `data:` addresses, under names that an import map knows.

    `in_english`: without the Chinese strings, which take 18 kB.
    """
    modules = {file.name: _bare(file.read_text(encoding="utf-8")) for file in sorted(STATIC.glob("*.js"))}
    addresses = {f"inspector/{name}": f"data:text/javascript,{quote(code, PLAIN)}" for name, code in modules.items()}
    style = "".join((STATIC / name).read_text(encoding="utf-8") for name in STYLES)
    return _fill(
        source,
        style=f"<style>\n{style}</style>",
        script=f'<script type="importmap">{_json({"imports": addresses})}</script>\n'
        '<script type="module">import "inspector/main.js";</script>',
        in_english=in_english,
    )


def inline_source(recordings: list[tuple[str, str]], book: str | None = None) -> dict[str, Any]:
    """The source of a page that has its recordings in it: (name, text). `book` is where chapters are, with {} for a name."""
    source: dict[str, Any] = {"recordings": [{"name": name, "text": text} for name, text in recordings]}
    return {"kind": "inline"} | source | ({} if book is None else {"book": book})


def one_file(recordings: list[Path], html: Path, book: str | None = None) -> None:
    """Write a page that works from disk. Raises ValueError if it cannot be written, or a recording cannot be read."""
    texts = [(path.name, path.read_text(encoding="utf-8-sig")) for path in recordings]
    write_whole(html, whole_page(inline_source(texts, book)))


def _bare(code: str) -> str:
    """A module whose imports name the import map's entries: a `data:` address has no neighbours. Without indentation and lines of comments."""
    code = re.sub(r"^ *((//.*|/\*\*.*\*/)\n)?", "", code, flags=re.MULTILINE)
    return re.sub(r'\bfrom "\./([\w.-]+)"', r'from "inspector/\1"', code)


def _json(value: Any) -> str:
    """JSON that can stand in a page: no text in it ends the script."""
    return msgspec.json.encode(value).decode().replace("<", "\\u003c")


def _fill(source: dict[str, Any], style: str, script: str, in_english: bool = False) -> str:
    page = (STATIC / "index.html").read_text(encoding="utf-8")
    filled = SOURCE.replace("null", _json(source))
    words = None if in_english else msgspec.json.decode((STATIC / "strings.zh.json").read_bytes())
    strings = STRINGS.replace("null", _json(words))
    for place, content in ((STYLE, style), (SCRIPT, script), (STRINGS, strings), (SOURCE, filled)):
        page = page.replace(place, content)
    return page
