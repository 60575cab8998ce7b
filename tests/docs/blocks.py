"""The commands that the documentation shows: fenced blocks of bash, console and Python, and what is said above them.

A comment above a block, which no reader sees, may say one of two things:

    <!-- no-run: downloads a model -->      why it is not executed; the reason begins with one of `REASONS`
    <!-- before: cd examples -->            what is executed first, in the block's language (a smaller workload, a file)

A Python block that begins with the name of a file in a comment (`# my_backends.py`) is saved under that name.
An excerpt of the source (`docs/_tools/excerpts.py`) is nothing to type, and left out.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("docs", "folovllm", "milestones", "tools")
LANGUAGES = ("bash", "console", "python")
REASONS = (
    "needs a GPU",
    "needs two GPUs",
    "needs two machines",
    "downloads",
    "installs",
    "opens a browser",
    "starts the whole test suite",
    "takes minutes of training",
    "shows a format",
)
DIRECTIVE = re.compile(r"<!--\s*(no-run|before):\s*(.*?)\s*-->", re.DOTALL)
EXCERPT = re.compile(r"<!-- (code|signature) ")
LOOKS_LIKE_COMMANDS = re.compile(r"^(\$ |folovllm |python |pytest |make |pip )", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Block:
    page: Path
    line: int  # of the fence, from 1
    language: str
    code: str
    no_run: str = ""
    before: str = ""

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def script(self) -> str:
        """What is executed. Of a console's transcript, the lines behind a prompt."""
        code = self.code
        if self.language == "console":
            code = "\n".join(line[2:] for line in code.splitlines() if line.startswith("$ "))
        return f"{self.before}\n{code}\n" if self.before else f"{code}\n"

    @property
    def file_name(self) -> str:
        named = re.match(r"# ([\w-]+\.py)\n", self.code)
        return named[1] if named else f"block_{self.line}.py"


def pages() -> list[Path]:
    """Every Markdown file of the repository with something for a reader to type: hints, of exercises and builders, are nothing to run.

    Nor is the Chinese edition: its commands are those of the English one (`test_editions.py`). JupyterLab keeps copies of what it opened.
    """
    found = [*ROOT.glob("*.md"), *(page for folder in FOLDERS for page in (ROOT / folder).rglob("*.md"))]
    no_pages = {"hints", ".ipynb_checkpoints"}
    return sorted(page for page in found if no_pages.isdisjoint((*page.parts, page.stem)) and not page.match("*.zh.md"))


@cache
def parsed(text: str) -> list[Token]:
    """The tokens of a page. Many tests look at each page, so it is parsed once; nobody changes a token."""
    return MarkdownIt().enable("table").parse(text)


def blocks(page: Path, text: str | None = None) -> list[Block]:
    """The blocks of a page in order. ValueError for a reason that is none, and for commands in a block with no language."""
    tokens = parsed(page.read_text("utf-8") if text is None else text)
    found = []
    for above, token in zip([None, *tokens], tokens, strict=False):
        if token.type != "fence" or (above is not None and EXCERPT.match(above.content)):
            continue
        line, language = (token.map or [0])[0] + 1, token.info.split(" ")[0]
        said = _said(above)
        if "no-run" in said and not said["no-run"].startswith(REASONS):
            raise ValueError(f"{page}:{line}: {said['no-run']!r} is no reason; known are {', '.join(REASONS)}")
        if language in LANGUAGES:
            found.append(Block(page, line, language, token.content, said.get("no-run", ""), said.get("before", "")))
        elif not language and LOOKS_LIKE_COMMANDS.search(token.content):
            raise ValueError(
                f"{page}:{line}: commands in a block without a language are not checked; say bash or console"
            )
    return found


def _said(above: Token | None) -> dict[str, str]:
    return dict(DIRECTIVE.findall(above.content)) if above is not None and above.type == "html_block" else {}


def links(page: Path) -> list[str]:
    """Where a page's links and pictures lead, without addresses of the web and places in the same page."""
    inline = (child for token in parsed(page.read_text("utf-8")) for child in token.children or ())
    targets = (str(child.attrs.get("href") or child.attrs.get("src") or "") for child in inline)
    return [target.partition("#")[0] for target in targets if target and not re.match(r"\w+:|#", target)]
