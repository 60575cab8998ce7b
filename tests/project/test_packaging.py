"""What is promised around the code: pinned versions, commands that exist, a book whose excerpts are the code."""

from __future__ import annotations

import importlib.util
import itertools
import re
import sys
import tomllib
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

from milestones.manifest import Course

ROOT = Path(__file__).resolve().parents[2]
MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = {*re.findall(r"^([a-z]+):", MAKEFILE, re.MULTILINE)}


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return {name.lower(): version for name, _, version in (line.partition("==") for line in lines) if version}


class TestInstallation:
    def test_every_dependency_is_pinned(self) -> None:
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        extras = project["optional-dependencies"]
        tested = (extras[name] for name in ("dev", "docs", "notebooks", "serve"))
        wanted = [*project["dependencies"], *itertools.chain.from_iterable(tested)]
        names = {re.match(r"[\w-]+", line)[0].lower() for line in wanted}  # type: ignore[index]
        assert names - pins().keys() == set()

    def test_make_installs_the_pinned_torch(self) -> None:
        assert f"torch=={pins()['torch']}\n" in MAKEFILE


def test_every_make_target_exists() -> None:
    assert {
        *re.findall(r"\bmake ([a-z]+)", (ROOT / "README.md").read_text()),
        *re.findall(r"make ([a-z]+)", MAKEFILE),
    } <= TARGETS


@pytest.fixture(scope="module")
def book() -> ModuleType:
    spec = importlib.util.spec_from_file_location("book_excerpts", ROOT / "docs" / "_tools" / "excerpts.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PAGES = [ROOT / "README.md", *sorted(page for page in (ROOT / "docs").rglob("*.md") if not page.match("*.zh.md"))]
COMPUTED = {  # pages whose numbers come from engines of later milestones that run, a second or more each
    "shapes.md": "m3",
    "builders.md": "m6",
    "1_offline_inference.md": "m6",
    "2_continuous_batching.md": "m6",
    "4_kernels.md": "m6",
    "6_speed_and_scale.md": "m6",
    "x4_experts.md": "x4",
    "x6_rollouts.md": "x6",
}


def marks_of(page: Path) -> list[pytest.MarkDecorator]:
    """Of the milestone that a page needs."""
    return [getattr(pytest.mark, COMPUTED[page.name]), pytest.mark.slow] if page.name in COMPUTED else []


class TestBook:
    @pytest.mark.parametrize("page", [pytest.param(p, id=p.name, marks=marks_of(p)) for p in PAGES])
    def test_every_excerpt_is_the_source(self, book: ModuleType, page: Path) -> None:
        text = page.read_text("utf-8")
        if book.fill_in(text) != text:
            said = f"{page.relative_to(ROOT)} shows code that has changed: run `python docs/_tools/excerpts.py`"
            pytest.fail(said, pytrace=False)

    def test_a_stale_page_is_written_anew_and_a_fresh_one_stays(self, book: ModuleType) -> None:
        stale = "Text.\n\n<!-- code folovllm.config:DEFAULT_MAX_MODEL_LEN -->\nold\n<!-- end -->\n\nMore.\n"
        fresh = book.fill_in(stale)
        code = "```python\n# folovllm/config.py: DEFAULT_MAX_MODEL_LEN\nDEFAULT_MAX_MODEL_LEN = 4096\n```"
        assert fresh == stale.replace("\nold\n", f"\n\n{code}\n\n")
        assert book.fill_in(fresh) == fresh

    def test_no_page_shows_the_answer_to_an_exercise(self) -> None:
        answers = {str(symbol) for exercise in Course(ROOT).exercises for symbol in exercise.symbols}
        shown = [mark for page in PAGES for mark in re.findall(r"^<!-- code (\S+) -->$", page.read_text("utf-8"), re.M)]
        assert [mark for mark in shown if any(f"{answer}.".startswith(f"{mark}.") for answer in answers)] == []

    def test_the_map_has_a_row_for_every_exercise(self) -> None:
        text = (ROOT / "docs" / "map.md").read_text("utf-8")
        rows = re.findall(r"^\| `([\w.]+)` \| .*\| ([mx]\d+\.\d+) \|$", text, re.MULTILINE)
        assert Counter(rows) == Counter((s.name, e.id) for e in Course(ROOT).exercises for s in e.symbols)

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("<!-- code folovllm.config:NOPE -->\n<!-- end -->\n", "there is no"),
            ("<!-- code folovllm.config:EngineConfig.nope -->\n<!-- end -->\n", "there is no"),
            ("<!-- code folovllm.nope:X -->\n<!-- end -->\n", "there is no"),
            ("<!-- symbols folovllm.apps.cli.flags:flag_name -->\n<!-- end -->\n", "is not in the reading order"),
            # Marks come in pairs: else the text between two of them would be lost.
            ("<!-- picture x -->\n<!-- end -->\n", "<!-- end -->"),
            ("<!-- milestones -->\nno end\n", "<!-- end -->"),
            ("<!-- milestones -->\n\n<!-- flags x:y -->\n<!-- end -->\n", "<!-- end -->"),
        ],
    )
    def test_marks_that_mean_nothing_fail(self, book: ModuleType, text: str, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            book.fill_in(f"Text.\n\n{text}")

    def test_only_a_line_of_its_own_is_a_mark(self, book: ModuleType) -> None:
        text = "Write `<!-- code x:y -->` for it.\n"
        assert book.fill_in(text) == text

    def test_the_backend_of_the_reference_page_works(self) -> None:
        """It is run as printed, against the oracle, over a ragged batch of prompts and decodes."""
        import torch

        from folovllm.attention.backends.registry import BACKENDS
        from tests.helpers import Driver, assert_logits_equal, prompts, tiny_checkpoint

        page = (ROOT / "docs" / "reference" / "adding_a_backend.md").read_text("utf-8")
        (example,) = (
            code for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "class SdpaBackend" in code
        )
        module = ModuleType("my_backends")
        exec(example, module.__dict__)
        with pytest.MonkeyPatch.context() as patch, torch.inference_mode():
            patch.setitem(sys.modules, "my_backends", module)
            patch.setitem(BACKENDS, "sdpa", "my_backends:SdpaBackend")
            ours, oracle = (Driver(tiny_checkpoint(), name, block_size=4) for name in ("sdpa", "torch_naive"))
            first, second, later = prompts([9, 14, 5])
            for pieces in ({0: first, 1: second}, {0: [7], 1: later}, {0: [8], 1: [9]}):
                got, expected = ours.step(pieces), oracle.step(pieces)
                for seq in pieces:
                    assert_logits_equal(got[seq], expected[seq])
