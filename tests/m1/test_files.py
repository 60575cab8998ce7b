"""A file is there as a whole or not at all."""

import os
from pathlib import Path

import pytest

from folovllm.models.written_files import write_whole
from tests.helpers import no_file_beyond


def test_it_is_written_with_the_mode_of_any_file(tmp_path: Path) -> None:
    write_whole(tmp_path / "a", "déjà vu\n")
    (tmp_path / "b").write_text("")
    assert (tmp_path / "a").read_text(encoding="utf-8") == "déjà vu\n"
    assert (tmp_path / "a").stat().st_mode == (tmp_path / "b").stat().st_mode


def test_a_full_disk_leaves_what_was_there(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("old")
    with no_file_beyond(1000), pytest.raises(ValueError, match=r"cannot write .*a: File too large"):
        write_whole(tmp_path / "a", b"x" * 10_000)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("a", "old")]


def test_a_folder_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot write .*: No such file or directory"):
        write_whole(tmp_path / "absent" / "a", "")


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "a")
    write_whole(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "a").read_text() == "new"


def test_what_is_no_regular_file_is_not_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    write_whole(tmp_path / "pipe", "new")
    assert os.read(reader, 10) == b"new" and (tmp_path / "pipe").is_fifo()
    os.close(reader)
