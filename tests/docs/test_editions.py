"""The Chinese edition says what the English one does: code, links, exercises and numbers of all that is not stale."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tests.docs.blocks import ROOT, links, pages

SOURCE = "# Waste\n\nM3 wastes 1.4% of 48 GiB, 9,718 tokens in 16 ms of 4.0 billion ([M3](3.md#a)). See `free` and m3.1.\n\n```bash\nls  # all\n```\n"
CHINESE = "# 浪费\n\nM3 只浪费 48 GiB 的 1.4%，16 ms 里 9,718 个 token，共 40 亿（[M3](3.zh.md#a)）。见 `free` 和 m3.1。\n\n```bash\nls  # 全部\n```\n"


@pytest.fixture(scope="module")
def editions() -> Iterator[ModuleType]:
    sys.path[:0] = [str(ROOT / "docs/_tools"), str(ROOT / "tools")]
    yield importlib.import_module("editions")
    del sys.path[:2]


@pytest.fixture
def alike(editions: ModuleType) -> ModuleType:
    return importlib.import_module("alike")


@pytest.fixture
def tool(editions: ModuleType) -> ModuleType:
    return importlib.import_module("translation")


def test_both_editions_say_the_same(editions: ModuleType) -> None:
    assert [said for pair in editions.pairs() for said in pair.differences()] == []


def test_what_a_tool_fills_in_is_the_same(editions: ModuleType) -> None:
    for pair in editions.pairs():
        if pair.target.is_file() and pair.source.suffix == ".md":
            text = pair.target.read_text("utf-8")
            if editions.filled_from(pair.source.read_text("utf-8"), text) != text:
                pytest.fail(f"{pair}: run `python docs/_tools/excerpts.py`", pytrace=False)


def test_notebooks_are_those_of_their_cells(editions: ModuleType) -> None:
    begun = [pair for pair in editions.pairs() if pair.source.suffix == ".py" and pair.target.is_file()]
    for pair in begun:
        english, ours = (ROOT / "notebooks" / folder / f"{pair.source.stem}.ipynb" for folder in ("", "zh"))
        if editions.chinese_notebook(pair, english.read_text("utf-8")) != ours.read_text("utf-8"):
            pytest.fail(f"{pair}: run `python tools/translation.py notebooks`", pytrace=False)


def test_links_lead_somewhere_and_no_command_runs_twice(editions: ModuleType) -> None:
    begun = [pair.target for pair in editions.pairs() if pair.target.is_file()]
    assert begun and not {*begun} & {*pages()}
    for page in begun:
        folder = page.parents[1] if page.parent.name == "src" else page.parent  # a notebook's cells lie below it
        assert [target for target in links(page) if not (folder / target).exists()] == [], page


def test_emphasis_is_shown_by_every_reader(editions: ModuleType, alike: ModuleType) -> None:
    """`**如此。**然后` keeps its stars on a code host: between full stop and word there has to be a space."""
    assert alike.stray_stars("**如此。**然后") and not alike.stray_stars("**如此。** 然后 $a*b$ `*` A\\* **这样**就")
    begun = [pair for pair in editions.pairs() if pair.target.is_file() and pair.source.suffix != ".toml"]
    found = {str(pair): alike.stray_stars(pair.target.read_text("utf-8")) for pair in begun}
    assert {page: stars for page, stars in found.items() if stars} == {}


def test_every_chinese_file_translates_something(editions: ModuleType) -> None:
    known = {pair.target for pair in editions.pairs()}
    folders = [ROOT / name for name in ("docs", "milestones", "notebooks")]
    assert {*ROOT.glob("*.zh.md"), *(page for folder in folders for page in folder.rglob("*.zh.md"))} <= known


class TestDifferences:
    def test_a_translation_has_none(self, alike: ModuleType) -> None:
        assert alike.differences(SOURCE, CHINESE) == []
        assert alike.differences("A 30-billion model.\n", "300 亿参数的模型。\n") == []
        assert alike.differences("A 30-billion model.\n", "30 亿参数的模型。\n")

    @pytest.mark.parametrize(
        ("old", "new", "kind"),
        [
            ("1.4%", "1.3%", "quantities"),
            ("16 ms", "16 s", "quantities"),
            ("16 ms 里", "16 ms，也是 16 ms 里", "quantities"),
            ("9,718", "9,178", "quantities"),
            ("40 亿", "4 亿", "quantities"),
            ("48 GiB", "48 GB", "quantities"),
            ("3.zh.md#a", "3.zh.md#b", "links"),
            ("m3.1", "m3.2", "exercises"),
            ("`free`", "`release`", "names in code"),
            ("ls  ", "ls -l  ", "code"),
        ],
    )
    def test_a_changed_figure_is_found(self, alike: ModuleType, old: str, new: str, kind: str) -> None:
        (said,) = alike.differences(SOURCE, CHINESE.replace(old, new))
        assert said.startswith(f"{kind}: the source has ")


class TestStates:
    @pytest.fixture
    def pair(self, editions: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> object:
        (tmp_path / "a.md").write_text(SOURCE + "\n## More\n\nText.\n", "utf-8")
        pair = editions.Pair(tmp_path / "a.zh.md", tmp_path / "a.md")
        for module in (editions, importlib.import_module("translation")):
            monkeypatch.setattr(module, "ROOT", tmp_path)
            monkeypatch.setattr(module, "pairs", lambda: [pair])
        return pair

    def run(self, tool: ModuleType, pair: object, *arguments: str) -> int:
        command, *rest = arguments
        status: int = tool.main([command, str(pair.source), *rest])  # type: ignore[attr-defined]
        return status

    def test_from_the_first_word_to_a_release(
        self, tool: ModuleType, pair: object, capsys: pytest.CaptureFixture[str]
    ) -> None:
        source, target = pair.source, pair.target  # type: ignore[attr-defined]
        assert self.run(tool, pair, "check") == 0 and self.run(tool, pair, "check", "--release") == 1
        self.run(tool, pair, "new")
        assert re.findall("<!-- source: (.*) -->", target.read_text("utf-8")) == ["waste", "more"]
        target.write_text(f"<!-- source: waste -->\n{CHINESE}<!-- source: more -->\n## 更多\n", "utf-8")
        assert pair.states() == {"waste": "missing", "more": "missing"}  # type: ignore[attr-defined]
        assert self.run(tool, pair, "stamp") == 0 and self.run(tool, pair, "check", "--release") == 0

        source.write_text(source.read_text("utf-8").replace("1.4%", "1.5%").replace("## More", "## Moved"), "utf-8")
        assert pair.states() == {"waste": "stale", "moved": "missing", "more": "left over"}  # type: ignore[attr-defined]
        assert self.run(tool, pair, "check") == 0, "a stale section is no failure"
        assert self.run(tool, pair, "check", "--release") == 1
        self.run(tool, pair, "status")
        assert (
            "stale waste, missing moved, left over more\n0 current, 1 missing, 1 stale, 1 left over"
            in capsys.readouterr().out
        )
        assert self.run(tool, pair, "stamp") == 0 and pair.states()["waste"] == "stale"  # type: ignore[attr-defined]
        assert self.run(tool, pair, "stamp", "--section", "waste") == 1, "stamped, and the old figure is in it"
