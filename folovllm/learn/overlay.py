"""Import a learner's file in place of the package's own.

`FOLOVLLM_MINE` names a folder in which `mine/folovllm/cache/block_manager.py` stands for
`folovllm/cache/block_manager.py`. The package's first lines call `install`, so the switch holds in every process that
inherits the environment: workers, notebooks, consoles. Standard library only; nothing of the engine is imported here.
"""

import json
import os
import sys
from collections.abc import Iterator, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType

PACKAGE = __name__.partition(".")[0]


def locate(folder: str | Path = "mine") -> Path:
    """Absolute path of `folder`: as given, else under the nearest parent of the working directory, else beside the package.

    Raises `FileNotFoundError` where there is none, for a switch that silently tests the reference is a false green.
    """
    beside = Path(__file__).resolve().parents[2]
    for base in (Path.cwd(), *Path.cwd().parents, beside):
        if (base / folder / PACKAGE).is_dir():
            return (base / folder).resolve()
    switch = " or unset FOLOVLLM_MINE" if os.environ.get("FOLOVLLM_MINE") else ""
    raise FileNotFoundError(
        f"no {folder}/{PACKAGE} here or above: create it with `python -m milestones start m1`{switch}"
    )


class Overlay(MetaPathFinder):
    """Finds `<mine>/folovllm/x.py` for the module `folovllm.x`; the package's finder serves everything else."""

    def __init__(self, mine: Path) -> None:
        self.mine = mine

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        file = self.mine.joinpath(*fullname.split(".")).with_suffix(".py")
        return spec_from_file_location(fullname, file) if fullname.startswith(PACKAGE) and file.is_file() else None


def install(folder: str | Path | None = None) -> Path:
    """Switch the learner's files on, here and in child processes; a second call does nothing more. Call it before other folovllm imports.

    Raises ImportError where a file was copied from another version of the package: the two do not fit each other.
    """
    mine = locate(folder or os.environ["FOLOVLLM_MINE"])
    if old := outdated(mine):
        raise ImportError(f"the reference has changed since {old} was copied: python -m milestones update")
    os.environ["FOLOVLLM_MINE"] = str(mine)  # absolute: children may run in another folder
    sys.meta_path[:] = [Overlay(mine), *(f for f in sys.meta_path if not isinstance(f, Overlay))]
    return mine


def outdated(mine: Path) -> Path | None:
    """The first file of the learner's whose original, which the course keeps in `.base`, is no longer the package's."""
    stored, beside = mine / ".base", Path(__file__).resolve().parents[2]
    for file in sorted(stored.rglob("*.py")):
        own, now = (folder / file.relative_to(stored) for folder in (mine, beside))
        if own.is_file() and not (now.is_file() and now.read_bytes() == file.read_bytes()):
            return own
    return None


def strays(mine: Path) -> Iterator[tuple[str, str]]:
    """(module, file) of every loaded module that has a file in `mine` but came from elsewhere: not the learner's code."""
    for file in sorted((mine / PACKAGE).rglob("*.py")):
        name = ".".join(file.relative_to(mine).with_suffix("").parts)
        loaded = getattr(sys.modules.get(name), "__file__", None)
        if loaded and Path(loaded).resolve() != file.resolve():
            yield name, loaded


def started_milestone() -> str | None:
    """The highest milestone that was started in the learner's folder, as the course notes it there; None without either.

    Electives are noted there too, and have no preset. Raises ValueError where the notes cannot be read.
    """
    mine = os.environ.get("FOLOVLLM_MINE")
    if not mine or not (note := Path(mine, ".course.json")).is_file():
        return None
    try:
        started = json.loads(note.read_text(encoding="utf-8")).get("started", [])
        return max((id for id in started if id.startswith("m")), default=None)
    except (ValueError, TypeError, AttributeError):
        raise ValueError(f"{note} is damaged: `python -m milestones` says what to do") from None
