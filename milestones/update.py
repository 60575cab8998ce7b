"""`update`: the fresh reference around what a learner wrote, in today's names, wherever an exercise is now. All of it, or nothing."""

import ast
import json
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from milestones import splice
from milestones.language import t
from milestones.manifest import Course
from milestones.mine import Mine, State
from milestones.renames import Change, bindings, dotted, follow, renamed, renamed_cells
from milestones.tasks import PACKAGE, Exercise, Symbol


def update(mine: Mine) -> list[str]:
    """Put the learner's bodies, and all else that was changed, into the files of the reference. Says what it did."""
    state = mine.state
    if not mine.outdated() and state.changes == len(mine.course.changes):
        return []
    return Update(mine, state).run()


@dataclass(frozen=True, slots=True)
class Copy:
    """A file of the learner's, and the reference that it was made from; of the learner's own there is none."""

    path: Path
    text: str
    base: str | None

    @property
    def module(self) -> str:
        return ".".join(self.path.with_suffix("").parts)

    @property
    def own(self) -> set[str]:
        """What the learner added at the top of the module."""
        before = ast.parse(self.base or "").body
        return splice.module_names(ast.parse(self.text).body) - splice.module_names(before)


@dataclass(frozen=True, slots=True)
class Origin:
    """A function in a learner's file that is now the body of an exercise's symbol."""

    copy: Copy
    name: str
    contracts: list[str]  # what has changed about its contract since
    was_cut: bool  # into a stub, once

    @property
    def is_stub(self) -> bool:
        return splice.is_stub(self.copy.text, self.name)

    @property
    def is_reference(self) -> bool:
        """Whether it was never an exercise for this learner, and is as it was."""
        return not (self.was_cut or self.is_stub) and splice.same_body(self.copy.text, self.copy.base or "", self.name)

    @property
    def is_carried(self) -> bool:
        return not (self.contracts or self.is_stub or self.is_reference)


@dataclass(slots=True)
class Outcome:
    """What is to become of one file: its text and base, and what is said about it."""

    said: str = ""
    text: str | None = None
    base: str | None = None
    stuck: bool = False


@dataclass(frozen=True)
class Update:
    mine: Mine
    state: State
    texts: dict[tuple[str, tuple[str, ...]], str] = field(default_factory=dict)  # renamed once

    @property
    def course(self) -> Course:
        return self.mine.course

    @cached_property
    def told(self) -> tuple[Change, ...]:
        """What the reference has renamed since."""
        return self.course.changes[self.state.changes :]

    def run(self) -> list[str]:
        """What was done, a line a file. Nothing is, where one file cannot be updated: half of the names would be yesterday's."""
        files = self._targets() | {self._today(copy): copy for copy in self.copies if copy.base is None}
        done = {path: self._outcome(path, copy) for path, copy in files.items()}
        if any(outcome.stuck for outcome in done.values()):
            for path, outcome in done.items():
                if outcome.stuck and outcome.text is not None:
                    self.mine.write(path.with_suffix(".py.new"), outcome.text)
            return [f"{path}: {outcome.said}" for path, outcome in sorted(done.items()) if outcome.stuck]
        done |= dict(self._notebooks())
        return self._write({path: outcome for path, outcome in done.items() if outcome.said})

    def _write(self, done: dict[Path, Outcome]) -> list[str]:
        """Write all files, after a backup of what was there."""
        mine, kept = self.mine, {main.path for path, main in self._targets().items() if main and main.path == path}
        gone = [copy.path for copy in self.copies if copy.base is not None and copy.path not in kept]
        moved = [copy.path for copy in self.copies if copy.base is None and self._today(copy) != copy.path]
        over = [copy.path for copy in self.copies if self._cut_builder(copy)]
        folder = mine.backup(
            *(path for path in sorted({*done, *gone, *moved, *over}) if (mine.folder / path).is_file())
        )
        for path, outcome in done.items():
            if outcome.text is not None:
                mine.write(path, outcome.text, outcome.base)
        for path in (*gone, *moved, *over):
            for file in (mine.folder / path, mine.folder / ".base" / path):
                file.unlink(missing_ok=True)
        said = {path: outcome.said for path, outcome in done.items()}
        said |= {path: t("the reference no longer has it; yours is in {folder}", folder=folder) for path in gone}
        self._remember()
        return [*(f"{path}: {words}" for path, words in sorted(said.items())), *self._cut_out(folder)]

    # -- what there is ---------------------------------------------------------------------------------------------

    @cached_property
    def copies(self) -> list[Copy]:
        """The learner's files."""
        mine, found = self.mine, []
        for file in sorted((mine.folder / PACKAGE).rglob("*.py")):
            path = file.relative_to(mine.folder)
            known = (mine.folder / ".base" / path).is_file() or (mine.course.root / path).is_file()
            found.append(Copy(path, mine.read(path) or "", mine.base(path) if known else None))
        return found

    @cached_property
    def changes(self) -> list[Change]:
        """What has another name since, the parameters of exercises last."""
        changes, fresh = [*self.told], self.course.source
        for symbol, origins in self.origins.items():
            base = _parameters(origins[0].copy.base or "", origins[0].name)
            now = _parameters(fresh(symbol.path), symbol.name)
            for old, new in zip(base, now, strict=True) if len(base) == len(now) else ():
                if old not in now and new not in base:
                    changes.append(Change(f"{symbol}({old})", f"{symbol}({new})", (self.exercise[symbol].id,)))
        return changes

    @cached_property
    def exercise(self) -> dict[Symbol, Exercise]:
        return {symbol: exercise for exercise in self.course.exercises for symbol in exercise.symbols}

    @cached_property
    def origins(self) -> dict[Symbol, list[Origin]]:
        """Where in the learner's files each symbol's body may be."""
        symbols, found = {dotted(str(symbol)): symbol for symbol in self.exercise}, dict[Symbol, list[Origin]]()
        for copy in self.copies:
            for name, _ in splice.functions(copy.base or ""):
                place, contracts = follow(self.told, f"{copy.module}.{name}")
                if symbol := symbols.get(place):
                    was_cut = f"{copy.module}:{name}" in self.state.blanked
                    found.setdefault(symbol, []).append(Origin(copy, name, contracts, was_cut))
        return found

    def _origin(self, symbol: Symbol) -> Origin | None:
        """Of several, one that is written, that at the symbol's own place first."""
        origins = sorted(self.origins.get(symbol, []), key=lambda o: (not o.is_carried, o.copy.path != symbol.path))
        return next(iter(origins), None)

    def _targets(self) -> dict[Path, Copy | None]:
        """Each file that is to be here, and the learner's that becomes it, if one does."""
        found: dict[Path, Copy | None] = {}
        for copy in sorted((c for c in self.copies if c.base is not None), key=lambda c: c.path != self._home(c)):
            if home := self._home(copy):
                found.setdefault(home, copy)
        return found | {symbol.path: None for symbol in self.origins if symbol.path not in found}

    def _home(self, copy: Copy) -> Path | None:
        """Where the reference has today what the file was a copy of."""
        moved, _ = follow(self.told, copy.module)
        places = (Path(*moved.split(".")).with_suffix(".py"), copy.path)
        return next((path for path in places if (self.course.root / path).is_file()), None)

    # -- a file ----------------------------------------------------------------------------------------------------

    def _outcome(self, path: Path, copy: Copy | None) -> Outcome:
        try:
            return self._own(copy) if copy and copy.base is None else self._file(path, copy)
        except (LookupError, SyntaxError) as error:
            return Outcome(t("not updated, {error}; mend it and update again", error=error), stuck=True)

    def _file(self, path: Path, main: Copy | None) -> Outcome:
        fresh = self.course.source(path)
        if main and main.path == path and main.base == fresh and not self.changes:
            return Outcome()
        new = self._fresh(path, main)
        old, yours = self._sides(path, main) if main else (new, new)
        merged = new if yours == old else merge(yours, old, new) or append(yours, old, new)
        if merged is None:
            said = (
                "not updated, you and the reference changed the same lines; theirs with your bodies is in the .new file"
            )
            return Outcome(t(said), new, stuck=True)
        if main and main.path == path and (merged, fresh) == (main.text, main.base):
            return Outcome()
        return Outcome(self._said(path, main), merged, fresh)

    def _said(self, path: Path, main: Copy | None) -> str:
        carried, changed = [], set()
        for symbol in self._symbols(path):
            if (origin := self._origin(symbol)) and origin.is_carried:
                if (origin.copy.path, origin.name) != (path, symbol.name):
                    carried.append(t("{name} from {path}", name=symbol.name, path=origin.copy.path))
                if self._asked(origin, symbol) and self._is_started(self.exercise[symbol]):
                    changed.add(self.exercise[symbol].id)
        said = t("updated") if main and main.path == path else t("new")
        if carried:
            said += t(", with your {names}", names=", ".join(carried))
        if changed:
            said += t("; the text of {ids} has changed: read it again", ids=", ".join(sorted(changed)))
        return said

    def _asked(self, origin: Origin, symbol: Symbol) -> bool:
        """Whether parameters or docstring say something else since, but for names."""
        base = self._renamed(origin.copy, origin.copy.base or "", (self.exercise[symbol].id,))
        name = _same_place(origin.copy.base or "", base, origin.name)
        return _asks(base, name) != _asks(self.course.source(symbol.path), symbol.name)

    def _fresh(self, path: Path, main: Copy | None) -> str:
        """The reference's file with the learner's bodies, and stubs where there is none."""
        text, helpers = self.course.source(path), dict[Path, str]()
        for symbol in self._symbols(path):
            exercise, origin = self.exercise[symbol], self._origin(symbol)
            if origin and origin.is_carried:
                source = self._renamed(origin.copy, origin.copy.text, (exercise.id,))
                name = _same_place(origin.copy.text, source, origin.name)
                function, at_hand = splice.find(source, name), splice.module_names(ast.parse(text).body)
                used = {word for word in splice.in_reach(source, function.node) if "." not in word}
                if origin.copy is main:
                    at_hand |= origin.copy.own
                elif used & origin.copy.own:
                    helpers[origin.copy.path] = _statements(source, origin.copy.own)
                    at_hand |= origin.copy.own
                first = filter(None, (self._import(origin.copy, source, word) for word in sorted(used - at_hand)))
                text = splice.graft(text, symbol.name, source, name, first)
            elif not origin.is_reference if origin else self._is_started(exercise):
                text = splice.blank(text, {symbol.name: exercise.id})
        return text + "".join(helpers.values())

    def _sides(self, path: Path, main: Copy) -> tuple[str, str]:
        """The reference then, with the learner's bodies, and what the learner has, in today's names: what differs was added."""
        old, ids = main.base or "", tuple(self.exercise[symbol].id for symbol in self._symbols(path))
        exercises = {o.name for origins in self.origins.values() for o in origins if o.copy is main}
        for name, _ in splice.functions(old):
            if name in exercises or f"{main.module}:{name}" in self.state.blanked:
                old = splice.graft(old, name, main.text)
        return self._renamed(main, old, ids), self._renamed(main, main.text, ids)

    def _own(self, copy: Copy) -> Outcome:
        """A file that is the learner's alone, as a builder is."""
        path = self._today(copy)
        ids = [builder.id for builder in self.course.builders if builder.path == path]
        text = self._renamed(copy, copy.text, tuple(ids or (e.id for e in self.course.exercises)))
        if self._cut_builder(copy) or (text, path) == (copy.text, copy.path):
            return Outcome()
        return Outcome(t("updated") if path == copy.path else t("new"), text)

    def _today(self, copy: Copy) -> Path:
        """Where a file of the learner's own belongs: with its package, which may have moved."""
        return Path(*follow(self.told, copy.module)[0].split(".")).with_suffix(".py")

    def _notebooks(self) -> Iterator[tuple[Path, Outcome]]:
        """The learner's notebooks that said what has another name now."""
        all_ids = [exercise.id for exercise in self.course.exercises]
        for file in sorted(self.mine.folder.glob("*.ipynb")):
            ids = [id for id in all_ids if file.name.startswith(f"{id.partition('.')[0]}_")] or all_ids
            try:
                book = json.loads(file.read_text(encoding="utf-8"))
                cells = [cell for cell in book["cells"] if cell.get("cell_type", "code") == "code"]
            except (ValueError, TypeError, KeyError):
                continue  # none that Jupyter could open
            before = ["".join(cell["source"]) for cell in cells]
            after = renamed_cells(before, self.changes, ids)
            for cell, source in zip(cells, after, strict=True):
                cell["source"] = source if isinstance(cell["source"], str) else source.splitlines(keepends=True)
            if before != after:
                fresh = json.dumps(book, indent=1, ensure_ascii=False) + "\n"
                yield file.relative_to(self.mine.folder), Outcome(t("in the names of today"), fresh)

    # -- how -------------------------------------------------------------------------------------------------------

    def _renamed(self, copy: Copy, text: str, ids: tuple[str, ...]) -> str:
        heard = tuple(id for id in ids if any(change.only for change in self.changes))
        if (text, heard) not in self.texts:
            self.texts[text, heard] = renamed(text, self.changes, ids, copy.module)
        return self.texts[text, heard]

    def _import(self, copy: Copy, source: str, name: str) -> str:
        """The statement that gives a body what its module had and its new one has not; empty where nobody has it."""
        if path := bindings(ast.parse(source), "").get(name):
            home, _, last = path.rpartition(".")
            imported = last if last == name else f"{last} as {name}"
            return f"from {home} import {imported}" if home else f"import {imported}"
        for old in splice.module_names(ast.parse(copy.base or "").body):
            home, _, new = follow(self.changes, f"{copy.module}.{old}")[0].rpartition(".")
            file = self.course.root / Path(*home.split(".")).with_suffix(".py")
            if new == name and file.is_file() and name in splice.module_names(ast.parse(file.read_text("utf-8")).body):
                return f"from {home} import {name}"
        return ""

    def _cut_out(self, folder: Path) -> Iterator[str]:
        """What is to be written again, and why."""
        builders = {builder.path: builder.id for builder in self.course.builders}
        tasks = {f"{e.id} {symbol.name}": self._broken(symbol) for symbol, e in self.exercise.items()}
        tasks |= {
            builders[path]: self._cut_builder(copy) for copy in self.copies if (path := self._today(copy)) in builders
        }
        for task, contracts in tasks.items():
            if contracts:
                said = "{task} is cut out afresh, for it asks something else: {contract}; yours is in {folder}"
                yield t(said, task=task, contract="; ".join(contracts), folder=folder)
        for place in self._lost():
            yield t("{place} is no exercise any more; yours is in {folder}", place=place, folder=folder)

    def _lost(self) -> Iterator[str]:
        """Bodies that were written, of what no exercise is now."""
        now = {dotted(str(symbol)) for symbol in self.exercise}
        for copy in self.copies:
            for name, _ in splice.functions(copy.text):
                place = f"{copy.module}:{name}"
                is_gone = place in self.state.blanked and follow(self.changes, dotted(place))[0] not in now
                if is_gone and not splice.is_stub(copy.text, name):
                    yield place

    def _broken(self, symbol: Symbol) -> list[str]:
        """What has changed about the contract of a body that was written."""
        origin = self._origin(symbol)
        return [] if origin is None or origin.is_stub or origin.is_reference else origin.contracts

    def _cut_builder(self, copy: Copy) -> list[str]:
        """What has changed about the protocol of the builder that the file is."""
        protocols = [dotted(b.protocol) for b in self.course.builders if b.path == self._today(copy)]
        told = [(follow(self.told[n:], dotted(c.new))[0], c) for n, c in enumerate(self.told, 1) if c.contract]
        return [change.contract for place, change in told if place in protocols]

    def _remember(self) -> None:
        """What was cut out once, where it is now: `start` never does so again. What is cut out afresh has not passed."""
        now = {dotted(str(symbol)): str(symbol) for symbol in self.exercise}
        ours = [symbol for symbol in self.origins if (o := self._origin(symbol)) and not o.is_reference]
        moved = {now.get(follow(self.changes, dotted(place))[0], place) for place in self.state.blanked}
        broken = [self.exercise[symbol] for symbol in self.origins if self._broken(symbol)]
        self.state.blanked = sorted({*moved, *map(str, ours)})
        self.state.failed = [id for id in self.state.failed if id not in {e.id for e in broken}]
        self.state.passed = [id for id in self.state.passed if id not in {e.milestone for e in broken}]
        self.state.changes = len(self.course.changes)
        self.mine.save(self.state)

    def _symbols(self, path: Path) -> list[Symbol]:
        return [symbol for symbol in self.exercise if symbol.path == path]

    def _is_started(self, exercise: Exercise) -> bool:
        return exercise in self.course.onwards(*self.state.started)


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


def append(yours: str, base: str, theirs: str) -> str | None:
    """Theirs with what you added at the top of the module behind it, or None where you changed anything else."""
    before = [ast.dump(node) for node in ast.parse(base).body]
    now = {ast.dump(node): node for node in ast.parse(yours).body}
    added = [node for dump, node in now.items() if dump not in before]
    is_new = not splice.module_names(added) & splice.module_names(ast.parse(base).body)
    return theirs + _text(yours, added) if is_new and now.keys() >= {*before} else None


def _asks(source: str, name: str) -> tuple[str, str | None]:
    """Parameters and docstring of a function: what somebody who writes its body goes by."""
    node = splice.find(source, name).node
    return ast.unparse(node.args), ast.get_docstring(node)


def _parameters(source: str, name: str) -> list[str]:
    arguments = splice.find(source, name).node.args
    return [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]


def _same_place(text: str, other: str, name: str) -> str:
    """What the function is called in a text in which names alone are others."""
    names, others = ([name for name, _ in splice.functions(source)] for source in (text, other))
    if name not in names:
        raise LookupError(f"0 definitions of {name}")
    return others[names.index(name)]


def _statements(source: str, names: Iterable[str]) -> str:
    """The statements at the top of a module that bind these."""
    return _text(source, (node for node in ast.parse(source).body if splice.module_names([node]) & {*names}))


def _text(source: str, nodes: Iterable[ast.stmt]) -> str:
    """Statements as they are written, decorators and all, to put behind a module's last."""
    lines, found = source.split("\n"), []
    for node in nodes:
        first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
        found.append("\n\n" + "\n".join(lines[first - 1 : node.end_lineno]) + "\n")
    return "".join(found)
