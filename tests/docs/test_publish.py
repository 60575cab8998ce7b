"""The four fields that say where the project is published: empty, nothing is made of them; filled in, one command writes all."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = "README.md", "README.zh.md", "CITATION.cff", "pyproject.toml"
sys.path.insert(0, str(ROOT / "docs/_tools"))
from publish import fields, publish  # noqa: E402

OURS = re.compile(r"https?://(?!localhost|127\.0\.0\.1)[^\s)\"'>]*folovllm[^\s)\"'>]*", re.IGNORECASE)


def copy(to: Path, **values: str) -> Path:
    for name in PAGES:
        shutil.copy(ROOT / name, to)
    project = to / "pyproject.toml"
    text = project.read_text("utf-8")
    for name, value in values.items():
        text = text.replace(f'\n{name} = ""\n', f'\n{name} = "{value}"\n')
    project.write_text(text, "utf-8")
    return to


@pytest.mark.skipif(any(fields().values()), reason="the project is published")
def test_nobody_has_invented_an_address() -> None:
    """No tracked text names a repository, a site or an owner of ours before somebody has said where they are."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True).stdout
    texts = [
        ROOT / name
        for name in listed.split("\0")
        if name.endswith((".md", ".py", ".toml", ".yml", ".cff", ".html", ".js"))
    ]
    named = {
        file.name: found[0] for file in texts if file.is_file() and (found := OURS.findall(file.read_text("utf-8")))
    }
    assert not named, "an address that nobody has given"
    assert not (ROOT / "SECURITY.md").exists(), "there is nobody to write to yet"
    assert "badge" not in (ROOT / "README.md").read_text("utf-8")


def test_an_empty_field_is_named_and_nothing_is_written(tmp_path: Path) -> None:
    before = {name: (ROOT / name).read_bytes() for name in PAGES[:3]}
    with pytest.raises(ValueError, match=r"has no site, contact$"):
        publish(copy(tmp_path, owner="me", repository="course", site="", contact=""))
    assert before == {name: (tmp_path / name).read_bytes() for name in PAGES[:3]}


def test_one_command_writes_all_and_a_second_time_nothing(tmp_path: Path) -> None:
    copy(tmp_path, owner="me", repository="course", site="https://book.example", contact="me@book.example")
    publish(tmp_path)
    text = (tmp_path / "README.md").read_text("utf-8")
    assert "](docs/img" not in re.sub(r"(?<!!)\[[^]]*\]\(docs", "", text), "a picture that only the repository has"
    assert "(https://raw.githubusercontent.com/me/course/main/docs/img/inspector.webp)" in text
    assert text.splitlines()[2].startswith("[![tests](https://github.com/me/course/actions/")
    assert "me@book.example" in (tmp_path / "SECURITY.md").read_text("utf-8")
    assert "repository-code: https://github.com/me/course\n" in (tmp_path / "CITATION.cff").read_text("utf-8")
    once = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    publish(tmp_path)
    assert once == {file.name: file.read_bytes() for file in tmp_path.iterdir()}
