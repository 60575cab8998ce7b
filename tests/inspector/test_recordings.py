"""The recordings of the book and of the page's tests are what the engine does today."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from folovllm.apps.inspector.lines import read
from folovllm.apps.inspector.playground import Settings
from folovllm.apps.inspector.scenes import Scene, scenes
from tests.inspector.test_recording import replayed

ROOT = Path(__file__).resolve().parents[2]
BOOK = ROOT / "docs" / "assets" / "recordings"
SCENES = [file for scene in scenes().values() for file in scene.files]
FILES = [*BOOK.glob("*.jsonl"), *(ROOT / "tests" / "inspector" / "data").glob("m*.jsonl"), *SCENES]
MEASURED = scenes()["milestones"].files


@pytest.mark.slow
def test_the_engine_still_does_the_same() -> None:
    """In a process of its own: sequences are counted from 0, and no test has read the clock. Times may differ."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)} | {"FOLOVLLM_MINE": ""}
    command = [sys.executable, str(ROOT / "tools" / "recordings.py"), "--check"]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(done.stdout.splitlines()) == len(FILES) - len(MEASURED)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_each_is_small_and_whole(file: Path) -> None:
    found = read(file)
    assert file.stat().st_size <= (600 if file.stem == "choose" else 100) * 1024 and found.how == "closed"
    assert (found.header["started"] is None) == (file not in MEASURED), "a made-up clock has no date"
    watcher = replayed(found)
    assert not watcher.sequences and all(cell.is_free and not cell.ref_count for cell in watcher.cells)


@pytest.mark.parametrize("scene", scenes().values(), ids=list(scenes()))
def test_a_scene_stops_before_its_answer(scene: Scene) -> None:
    """Each recording tells its scene; the first has the moments at which the story begins, and stops, and goes on behind."""
    for file in scene.files:
        found = read(file).header["scene"]
        assert found == msgspec.to_builtins(scene.described()), "record it anew: python tools/recordings.py"
    assert 0 <= scene.start < scene.stop < len(read(scene.files[0]).turns()) - 1
    assert all(text and text[-1] in "?？" for text in (scene.words.question, scene.zh.question))
    assert (ROOT / "docs" / f"{scene.chapter}.md").is_file()
    for settings in scene.engines:
        Settings().changed(settings)  # the controls can show it


def test_the_book_shows_recordings_that_there_are() -> None:
    shown = {
        page.relative_to(ROOT / "docs").as_posix(): re.findall(
            r"<!-- recording (\w+)(?: (\w+))? -->", page.read_text(encoding="utf-8")
        )
        for page in (ROOT / "docs").rglob("*.md")
    }
    names = {page: [name for pair in pairs for name in pair if name] for page, pairs in shown.items() if pairs}
    assert [names.pop(page) for page in ("inspector.md", "inspector.zh.md")] == 2 * [list(scenes())], (
        "each scene, in order"
    )
    assert names and all(len(found) <= 2 for found in names.values()), "at most two a chapter"
    of_the_book = {
        name for found in names.values() for name in found
    } - scenes().keys()  # a chapter may show a scene, too
    assert of_the_book == {file.stem for file in BOOK.glob("*.jsonl")}
