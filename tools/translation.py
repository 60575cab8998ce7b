"""Keeps the Chinese edition in step: `python tools/translation.py status`. What belongs to what: `docs/_tools/editions.py`.

    status [FILE ...]           what is missing, stale or left over
    new FILE ...                begin translations: the source, with a mark above each section, at FILE with .zh.md
    stamp FILE ... [--section NAME]  say that sections are translated: write the hashes of their sources as they are now
    notebooks          write notebooks/zh/: the committed notebooks, code and outputs as they are, with the translated cells
    check [--release]           compare code, links, exercises and numbers of all that is current; with --release, all must be current

FILE is a source or its translation. `stamp` marks what has no hash yet; a stale section needs its `--section`: read it first.
It also turns links to pages into links to their Chinese editions.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "docs/_tools")]

from alike import TO_RUN  # noqa: E402
from editions import MARK, Pair, chinese_links, chinese_notebook, hash_of, pairs  # noqa: E402

WRONG = ("missing", "stale", "left over")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["status", "new", "stamp", "notebooks", "check"])
    parser.add_argument("files", nargs="*", metavar="FILE")
    parser.add_argument("--section", action="append", default=[], metavar="NAME")
    parser.add_argument("--release", action="store_true")
    options = parser.parse_args(arguments)
    chosen = _chosen(options.files)
    if options.command in ("new", "stamp") and not options.files:
        parser.error(f"{options.command} which files?")
    if options.command == "status":
        status(chosen)
    for pair in chosen:
        if options.command == "notebooks":
            notebook(pair)
        elif options.command == "new":
            new(pair)
        elif options.command == "stamp":
            stamp(pair, options.section)
    return check(chosen, options.release) if options.command in ("stamp", "check") else 0


def _chosen(files: list[str]) -> list[Pair]:
    """The pairs of these files; all if none is named. ValueError for a file that belongs to no pair."""
    every = pairs()
    paths = [Path(file).resolve() for file in files]
    if strangers := [str(path) for path in paths if not any(path in (pair.target, pair.source) for pair in every)]:
        raise ValueError(f"not in the Chinese edition: {', '.join(strangers)}")
    return [pair for pair in every if not files or {pair.target, pair.source} & {*paths}]


def status(chosen: list[Pair]) -> None:
    """A line for each file that is not in step; of those that were begun, its sections."""
    total: Counter[str] = Counter()
    for pair in chosen:
        states = pair.states()
        total.update(states.values())
        wrong = {name: state for name, state in states.items() if state in WRONG}
        if wrong and not pair.target.is_file():
            print(f"{pair}: not begun")
        elif wrong:
            print(f"{pair}: " + ", ".join(f"{state} {name}" for name, state in wrong.items()))
    print(", ".join(f"{total[state]} {state}" for state in ("current", *WRONG)))


def new(pair: Pair) -> None:
    """Write the source with marks, to be overwritten. ValueError where something is there."""
    if pair.target.exists():
        raise ValueError(f"{pair} is there already")
    pair.target.parent.mkdir(exist_ok=True)
    pair.target.write_text(
        TO_RUN.sub("", "".join(f"<!-- source: {name} -->\n{text}" for name, text in pair.sources().items())), "utf-8"
    )
    print(f"{pair}: begun")


def stamp(pair: Pair, names: list[str]) -> None:
    """Write the hashes of sections that have none, and of those that are named; lead links to Chinese pages."""
    sources, text = pair.sources(), pair.target.read_text("utf-8")
    if strangers := {*names} - {*pair.translated()}:
        raise ValueError(f"{pair} has no section {', '.join(strangers)}")

    def mark(match: re.Match[str]) -> str:
        name, old = match.groups()
        return (
            f"<!-- source: {name} {hash_of(sources[name])} -->\n"
            if name in sources and (not old or name in names)
            else match[0]
        )

    folder = pair.target.parent
    if folder.name == "src":  # a notebook's folder, not its source's
        folder = folder.parent
    pair.target.write_text(chinese_links(MARK.sub(mark, text), folder, but=pair.target), "utf-8")


def notebook(pair: Pair) -> None:
    """Write the Chinese notebook of a source, if its cells are begun."""
    if pair.source.suffix == ".py" and pair.target.is_file():
        source = ROOT / "notebooks" / f"{pair.source.stem}.ipynb"
        target = source.parent / "zh" / source.name
        target.parent.mkdir(exist_ok=True)
        target.write_text(chinese_notebook(pair, source.read_text("utf-8")), "utf-8")


def check(chosen: list[Pair], release: bool) -> int:
    """1 if current sections differ; with `release`, also if any is not current."""
    found = [difference for pair in chosen for difference in pair.differences()]
    if release:
        found += [
            f"{pair}, {name}: {state}" for pair in chosen for name, state in pair.states().items() if state in WRONG
        ]
    print(*found, sep="\n", end="\n" * bool(found), file=sys.stderr)
    return bool(found)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ValueError as error:
        sys.exit(f"error: {error}")
