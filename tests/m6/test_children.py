"""Where a child process looks for modules: where its parent does, and nowhere else."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

import folovllm
from folovllm.distributed.children import import_path

OWN = str(Path(folovllm.__file__).parents[1])


@pytest.mark.parametrize(
    ("here", "expected"),
    [
        (["/a", OWN, "/b"], ["/a", OWN, "/b"]),
        (["", "/a", OWN], ["/a", OWN]),  # an interactive Python, this package installed
        (["", "/a"], [OWN, "/a"]),  # found in the working directory
        (["/a", "/a"], ["/a", OWN]),  # found by a finder of its own
        ([Path("/b"), "/a", OWN], ["/a", OWN]),  # Python passes over what is no text
    ],
)
def test_the_paths_of_this_process(here: list[Any], expected: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", here)
    assert import_path().split(os.pathsep) == expected
