"""Every command that the documentation shows is executed, page by page, in a copy of the repository."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.blocks import ROOT, Block, blocks, links, pages
from tests.warm import Warm

SECONDS = 150  # for one block
README = ROOT / "README.md"
LEFT_OUT = shutil.ignore_patterns(".*", "mine", "site", "*.egg-info", "build", "dist")  # compiled modules come along
# README's are those of `test_readme.py`.
WITH_COMMANDS = [page for page in pages() if page != README and any(not block.no_run for block in blocks(page))]

# `solve m3` writes the bodies of a milestone's exercises into mine/, as a learner would have by the end of a chapter.
PRELUDE = """
solve() {
    python - "$1" << END
import sys
from milestones.manifest import Course
from milestones.mine import Mine

mine = Mine.of(Course.here())
mine.start(sys.argv[1])
for exercise in mine.course.milestone(sys.argv[1]).exercises:
    mine.paste(exercise)
END
}
"""


@pytest.fixture(scope="session")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shutil.copytree(ROOT, tmp_path_factory.mktemp("clone") / "folovllm", ignore=LEFT_OUT)


@pytest.fixture(scope="session")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of commands that need not import torch."""
    fixed = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in fixed.items():
            patch.setenv(name, value)
        with Warm(tmp_path_factory.mktemp("warm")) as warm:
            yield warm.folder


def environment(copy: Path, commands: Path) -> dict[str, str]:
    """The commands of this interpreter's environment, the modules of the copy, and nothing of the learner's."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("FOLOVLLM_", "PYTEST_"))}
    path = os.pathsep.join([str(commands), str(Path(sys.executable).parent), os.environ["PATH"]])
    return {**kept, "PATH": path, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def run(block: Block, copy: Path, commands: Path) -> str:
    """Execute a block; what it printed if it failed, else nothing."""
    if block.language == "python":
        (copy / block.file_name).write_text(block.script, "utf-8")
        command = ["python", block.file_name]
    else:
        command = ["bash", "-euo", "pipefail", "-c", PRELUDE + block.script]
    try:
        done = subprocess.run(
            command, cwd=copy, env=environment(copy, commands), stdin=subprocess.DEVNULL, timeout=SECONDS,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"still running after {SECONDS} s"
    return f"status {done.returncode}\n{done.stdout[-3000:]}" if done.returncode else ""


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", WITH_COMMANDS, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_works(page: Path, pristine: Path, warm: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(pristine, tmp_path / "folovllm", copy_function=os.link)
    for block in blocks(page):
        if not block.no_run and (said := run(block, copy, warm)):
            pytest.fail(f"{block} does not work: {said}", pytrace=False)
    shutil.rmtree(copy)  # thousands of files, which pytest would keep for three sessions


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    assert [target for target in links(page) if not (page.parent / target).exists()] == []


def test_read_m1_names_the_files_of_the_reading_order() -> None:
    """All of them and no other, and all exercises."""
    from milestones.manifest import Course

    command = [sys.executable, "-m", "milestones", "read", "m1"]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    table = (ROOT / "docs/reading_order.md").read_text("utf-8").partition("<!-- files m1 -->")[2]
    listed = re.findall(r"^\| `(\S+)`", table.partition("<!-- end of files -->")[0], re.MULTILINE)
    assert set(re.findall(r"folovllm/(\S+?\.py)\b", said)) == set(listed)
    assert {e.id for e in Course(ROOT).milestone("m1").exercises} <= set(re.findall(r"\bm1\.\d\b", said))


def test_the_reading_order_is_that_of_the_source() -> None:
    """But for the minutes, which may lag behind; and no exercise is in a file that it leaves out."""
    spec = importlib.util.spec_from_file_location("reading_order", ROOT / "docs/_tools/reading_order.py")
    assert spec and spec.loader
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    fresh, committed = (
        re.sub(r"\| \d+ \||about \d+ hours", "", text)
        for text in (tool.page(), (ROOT / "docs/reading_order.md").read_text("utf-8"))
    )
    assert fresh == committed, "run python docs/_tools/reading_order.py"
    from milestones.manifest import Course

    for exercise in Course.here(ROOT).exercises:
        assert exercise.id in committed, f"{exercise} is in no file of the reading order"
