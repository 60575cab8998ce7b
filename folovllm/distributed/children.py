"""Child processes: they import what this one imports, from where it imports it, and end when it ends."""

from __future__ import annotations

import os
import select
import sys
from pathlib import Path

PAUSE = 1000  # milliseconds between two checks of the parent's number


def python_command(module: str, *arguments: str) -> list[str]:
    """The command that runs a module of this package.

    `-P` keeps the working directory off the child's path: a `numpy.py` that lies there is no part of the program.
    """
    return [sys.executable, "-P", "-m", module, *arguments]


def import_path() -> str:
    """`PYTHONPATH` for such a child: the paths of this process, by name.

    An interactive Python has the working directory among them, as ``""``. A child needs it only if this package was found
    there. What is no text, Python passes over, too.
    """
    own = str(Path(__file__).parents[2])
    paths = [path or own for path in sys.path if isinstance(path, str) and (path or own not in sys.path)]
    return os.pathsep.join(dict.fromkeys([*paths, own]))


def end_with_parent(fd: int) -> None:
    """End this process as soon as its parent is gone, whatever it is doing.

    The parent's end of the connection `fd` is closed then, unless a fork of the parent has a copy. So this checks the
    parent's process number, too. It reads nothing: what the parent says is for the rank.
    """
    parent, connection = os.getppid(), select.poll()
    connection.register(fd, 0)  # of no event but the end
    while not connection.poll(PAUSE) and os.getppid() == parent:
        pass
    os._exit(1)
