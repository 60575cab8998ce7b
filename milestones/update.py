"""`update`: the fresh reference around what a learner wrote, also where an exercise has moved to another place."""

import ast
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from milestones import splice
from milestones.language import t
from milestones.mine import Mine, by_file, names
from milestones.tasks import Exercise, Symbol


def update(mine: Mine) -> list[str]:
    """Put the learner's bodies, and all else that was changed, into the files of the reference. Says what it did."""
    return Update(mine).run()


@dataclass(frozen=True, slots=True)
class Move:
    """A symbol that the learner still has at its `old` place; `text` is the file there."""

    exercise: Exercise
    new: Symbol
    old: Symbol
    text: str
    carries: bool  # whether a body is to be brought along: one was written there, and none at the new place


@dataclass(frozen=True)
class Update:
    """New places come before old ones: nothing leaves a file before it is safe in another."""

    mine: Mine

    def run(self) -> list[str]:
        """What was done, a line a file."""
        stored = self.mine.folder / ".base"
        files = sorted(path.relative_to(stored) for path in stored.rglob("*.py"))
        places = sorted({move.new.path for move in self.moves.values()})
        done = {path: self._file(path) for path in places}
        stuck = {path for path, said in done.items() if said.startswith(t("not updated"))}
        for path in (path for path in files if path not in places):
            waits = sorted({m.new.path for m in self._left(path)} & stuck)
            done[path] = t("not updated before {path} is", path=waits[0]) if waits else self._file(path)
        done |= {file.relative_to(self.mine.folder): t("imports from the new place") for file in self._notebooks()}
        self._remember(stuck)
        return [f"{path}: {said}" for path, said in sorted(done.items()) if said]

    @cached_property
    def moves(self) -> dict[Symbol, Move]:
        """By new place, those that are still to be made."""
        mine, found = self.mine, {}
        for exercise in mine.course.exercises:
            for new, old in exercise.moves.items():
                text, base = mine.read(old.path), mine.folder / ".base" / old.path
                if text is None or not base.is_file() or not _has(base.read_text(encoding="utf-8"), old.name):
                    continue
                written = _has(mine.read(new.path) or "", new.name) and not mine.is_blank(new, exercise)
                carries = not written and splice.stub_text(exercise.id, old.name) not in text
                found[new] = Move(exercise, new, old, text, carries)
        return found

    def _file(self, path: Path) -> str:
        """Update one file; says how that went, or nothing where nothing was to be done."""
        mine, text = self.mine, self.mine.read(path)
        carried = [t("{name} from {path}", name=m.new.name, path=m.old.path) for m in self._arriving(path) if m.carries]
        if not (mine.course.package.parent / path).is_file():
            return self._retire(path, text)
        fresh, changed = mine.course.source(path), self._changed(path)
        try:
            if text is None:
                said = self._bring(path, fresh) if list(self._arriving(path)) else ""
            else:
                said = self._merge(path, text, fresh) if carried or fresh != mine.base(path) else ""
        except (LookupError, SyntaxError) as error:
            return t("not updated, {error}; mend it and update again", error=error)
        if said in (t("new"), t("updated")):
            said += t(", with your {names}", names=", ".join(carried)) if carried else ""
            said += t("; the text of {ids} has changed: read it again", ids=", ".join(changed)) if changed else ""
        return said

    def _changed(self, path: Path) -> list[str]:
        """Exercises that are written, and whose parameters or docstring were others then."""
        found, fresh = [], self.mine.course.source(path)
        for symbol, exercise in self._exercises(path):
            move = self.moves.get(symbol)
            old = move.old if move is not None else symbol
            written = move.carries if move is not None else not self.mine.is_blank(symbol, exercise)
            base = self.mine.base(old.path) if self.mine.read(old.path) is not None else ""
            if (
                written
                and self._is_started(exercise)
                and _has(base, old.name)
                and _asks(base, old.name) != _asks(fresh, symbol.name)
            ):
                found.append(exercise.id)
        return sorted({*found})

    def _merge(self, path: Path, text: str, fresh: str) -> str:
        old, new = self._sides(path, text, fresh)
        merged = new if text == old else merge(text, old, new)
        if merged is None:
            self.mine.write(path.with_suffix(".py.new"), new)
            return t(
                "not updated, you and the reference changed the same lines; theirs with your bodies is in the .new file"
            )
        self.mine.backup(path)
        self.mine.write(path, merged, base=fresh)
        return t("updated")

    def _sides(self, path: Path, text: str, fresh: str) -> tuple[str, str]:
        """The reference then and now, both with the learner's bodies: what differs is what the reference changed."""
        old, new = self.mine.base(path), fresh
        known = dict(splice.functions(old))
        for symbol, exercise in self._exercises(path):
            move = self.moves.get(symbol)
            if symbol.name in known:
                old = splice.graft(old, symbol.name, text)
            if move is not None and move.carries:
                new = splice.graft(new, symbol.name, move.text, move.old.name)
            elif symbol.name in known:
                new = splice.graft(new, symbol.name, text)
            elif move is not None or self._is_started(exercise):
                new = splice.blank(new, {symbol.name: exercise.id})  # an exercise since
        for move in self._left(path):
            old = splice.graft(old, move.old.name, text)
        return old, new

    def _bring(self, path: Path, fresh: str) -> str:
        """A file that is not here, to which exercises have moved: as `start` brings it, with what was written."""
        course, state = self.mine.course, self.mine.state
        text = splice.blank(fresh, names(course.onwards(*state.started), path))
        for move in self._arriving(path):
            if move.carries:
                text = splice.graft(text, move.new.name, move.text, move.old.name)
        self.mine.write(path, text, base=fresh)
        return t("new")

    def _retire(self, path: Path, text: str | None) -> str:
        """A file that the reference no longer has: where its exercises have moved, it goes to the backup."""
        if text is None or not list(self._left(path)):
            return "" if text is None else t("the reference no longer has it; yours is kept")
        folder = self.mine.backup(path)
        for file in (self.mine.folder / path, self.mine.folder / ".base" / path):
            file.unlink()
        return t("the reference no longer has it; yours is in {folder}", folder=folder)

    def _notebooks(self) -> Iterator[Path]:
        """The learner's notebooks in which something was imported from an old place; now it is from the new one."""
        for file in sorted(self.mine.folder.glob("*.ipynb")):
            text = fresh = file.read_text(encoding="utf-8")
            for new, old in ((move.new, move.old) for move in self.moves.values()):
                (was, _, _), (name, _, _) = old.name.partition("."), new.name.partition(".")
                fresh = re.sub(
                    rf'"from {re.escape(old.module)} import {was}(?=\\n"|")',
                    f'"from {new.module} import {name}' + (f" as {was}" if was != name else ""),
                    fresh,
                )
            if fresh != text:
                self.mine.backup(file.relative_to(self.mine.folder))
                file.write_text(fresh, encoding="utf-8")
                yield file

    def _remember(self, stuck: set[Path]) -> None:
        """`start` never cuts out again what has arrived."""
        arrived = {str(move.new) for move in self.moves.values() if move.new.path not in stuck}
        if arrived:
            state = self.mine.state
            state.blanked = sorted({*state.blanked, *arrived})
            self.mine.save(state)

    def _arriving(self, path: Path) -> Iterator[Move]:
        return (move for move in self.moves.values() if move.new.path == path)

    def _left(self, path: Path) -> Iterator[Move]:
        return (move for move in self.moves.values() if move.old.path == path)

    def _exercises(self, path: Path) -> Iterator[tuple[Symbol, Exercise]]:
        for exercise in by_file(self.mine.course.exercises)[path]:
            yield from ((symbol, exercise) for symbol in exercise.symbols if symbol.path == path)

    def _is_started(self, exercise: Exercise) -> bool:
        return exercise in self.mine.course.onwards(*self.mine.state.started)


def merge(yours: str, base: str, theirs: str) -> str | None:
    """Both changes together, or None where they touch the same lines, or where git is not installed."""
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / name for name in ("yours", "base", "theirs")]
        for file, text in zip(files, (yours, base, theirs), strict=True):
            file.write_text(text, encoding="utf-8")
        try:
            done = subprocess.run(["git", "merge-file", "-p", *map(str, files)], capture_output=True, cwd=folder)
        except FileNotFoundError:
            return None
    return done.stdout.decode() if done.returncode == 0 else None


def _asks(source: str, name: str) -> tuple[str, str | None]:
    """Parameters and docstring of a function: what somebody who writes its body goes by."""
    node = splice.find(source, name).node
    return ast.unparse(node.args), ast.get_docstring(node)


def _has(source: str, name: str) -> bool:
    """Whether a text defines the function; not if it does not parse."""
    try:
        return name in dict(splice.functions(source))
    except SyntaxError:
        return False
