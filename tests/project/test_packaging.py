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

from folovllm.config import PRESETS
from milestones.manifest import Course

ROOT = Path(__file__).resolve().parents[2]
TARGETS = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)


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
        assert f"torch=={pins()['torch']}\n" in (ROOT / "Makefile").read_text()

    @pytest.mark.parametrize("file", ["pyproject.toml", "constraints.txt", "Makefile", ".ci/run", "README.md"])
    def test_no_address_of_an_index_is_built_in(self, file: str) -> None:
        assert not re.search(r"index-url|find-links|https?://", (ROOT / file).read_text())


class TestReadme:
    text = (ROOT / "README.md").read_text()

    def test_every_make_target_exists(self) -> None:
        assert set(re.findall(r"\bmake ([a-z]+)", self.text)) <= set(TARGETS)
        assert set(re.findall(r"make ([a-z]+)", (ROOT / "Makefile").read_text())) <= set(TARGETS)

    def test_every_row_of_the_table_is_a_preset(self) -> None:
        rows = re.findall(r"^\| \*\*(M\d)\*\*", self.text, re.MULTILINE)
        assert len(rows) >= 3 and rows == [name.upper() for name in PRESETS][: len(rows)]

    def test_every_folder_exists(self) -> None:
        folders = set(re.findall(r"^\| `(\w+)/` \|", self.text, re.MULTILINE)) - {"mine"}
        assert folders and all((ROOT / folder).is_dir() for folder in folders)


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
}


def marks_of(page: Path) -> list[pytest.MarkDecorator]:
    """Of the milestone that a page needs."""
    return [getattr(pytest.mark, COMPUTED[page.name]), pytest.mark.slow] if page.name in COMPUTED else []


class TestBook:
    @pytest.mark.parametrize("page", [pytest.param(p, id=p.name, marks=marks_of(p)) for p in PAGES])
    def test_every_excerpt_is_the_source(self, book: ModuleType, page: Path) -> None:
        text = page.read_text("utf-8")
        assert not re.search(r"^\{\{ ", text, re.MULTILINE), (
            "a line in braces stays one: the marks are comments, see the tool"
        )
        if book.fill_in(text) != text:
            pytest.fail(
                f"{page.relative_to(ROOT)} shows code that has changed: run `python docs/_tools/excerpts.py`",
                pytrace=False,
            )

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

    def test_a_constant_a_method_and_a_decorated_class(self, book: ModuleType) -> None:
        assert book.excerpt("folovllm.config:DEFAULT_MAX_MODEL_LEN") == "DEFAULT_MAX_MODEL_LEN = 4096"
        method = book.excerpt("folovllm.config:EngineConfig.for_milestone")
        assert method.startswith("@classmethod\ndef for_milestone(") and method.endswith("**overrides)")
        assert book.excerpt("folovllm.outputs:TokenLogprob").startswith("@dataclass(slots=True)\nclass TokenLogprob:")

    def test_a_signature_leaves_the_answer_out(self, book: ModuleType) -> None:
        shown = book.excerpt("folovllm.config:EngineConfig.for_milestone", signature=True)
        assert shown.endswith('"""\n    ...') and "return" not in shown
        bare = book.excerpt("folovllm.config:EngineConfig.__post_init__", signature=True)  # has no docstring
        assert bare.endswith("-> None:\n    ...")

    @pytest.mark.parametrize(
        "marker",
        [
            "code folovllm.config:NOPE",
            "code folovllm.config:EngineConfig.nope",
            "code folovllm.nope:X",
            "symbols folovllm.cli.flags:flag_name",
        ],
    )
    def test_what_is_not_there_fails(self, book: ModuleType, marker: str) -> None:
        with pytest.raises(ValueError, match=r"there is no|is not in the reading order"):
            book.fill_in(f"Text.\n\n<!-- {marker} -->\n<!-- end -->\n")

    @pytest.mark.parametrize(
        "text",
        [
            "<!-- picture x -->\n<!-- end -->\n",
            "<!-- milestones -->\nno end\n",
            "<!-- milestones -->\n\n<!-- flags x:y -->\n<!-- end -->\n",
        ],
    )
    def test_marks_come_in_pairs(self, book: ModuleType, text: str) -> None:
        """Else the text between two of them would be lost."""
        with pytest.raises(ValueError, match="<!-- end -->"):
            book.fill_in(text)

    def test_only_a_line_of_its_own_is_a_mark(self, book: ModuleType) -> None:
        text = "Write `<!-- code x:y -->` for it.\n"
        assert book.fill_in(text) == text

    def test_flags_are_those_of_the_command_line(self, book: ModuleType) -> None:
        rows = book.flag_table("folovllm.sampling_params:SamplingParams").splitlines()
        assert "| `--top-k` | `-1` | keep the k most likely tokens; -1 or 0 keeps all. |" in rows

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
