"""Child processes that import what this one imports, from where it imports it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import folovllm


def python_command(module: str, *arguments: str) -> list[str]:
    """The command that runs a module of this package.

    `-P` keeps the working directory off the child's path: a `numpy.py` that lies there is no part of the program.
    """
    return [sys.executable, "-P", "-m", module, *arguments]


def import_path() -> str:
    """`PYTHONPATH` for such a child: the paths of this process, by name.

    An interactive Python has the working directory among them, as ``""``. A child needs it only if this package was found
    there.
    """
    own = str(Path(folovllm.__file__).parents[1])
    paths = [path or own for path in sys.path if path or own not in sys.path]
    return os.pathsep.join(dict.fromkeys([*paths, own]))
