"""The learner's folder: what enters it, what leaves it, and that nothing written there is lost.

`mine/folovllm/...` copies of the reference with bodies cut out; `.base/` the reference that each copy was made from;
`.backup/` what a command was about to change; `.course.json` what was started, what was blanked, hints used.
"""

import ast
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime
from functools import cache
from pathlib import Path

from milestones import splice
from milestones.language import language, t
from milestones.manifest import Course
from milestones.tasks import PACKAGE, Exercise, Milestone, Symbol, WrongAnswer


@dataclass(slots=True)
class State:
    started: list[str] = field(default_factory=list)
    blanked: list[str] = field(default_factory=list)  # symbols that were cut out once: never again by `start`
    hints: dict[str, int] = field(default_factory=dict)  # exercise: rungs shown
    passed: list[str] = field(default_factory=list)  # milestones whose tests have all passed; `reset` strikes one off
    failed: list[str] = field(default_factory=list)  # exercises that failed when `test` or `watch` last ran their tests
    changes: int = 0  # how many of the reference's renames what is here has seen


@dataclass(frozen=True, slots=True)
class Mine:
    course: Course
    folder: Path

    @classmethod
    def of(cls, course: Course) -> "Mine":
        return cls(course, course.root / "mine")

    # -- state -----------------------------------------------------------------------------------------------------

    @property
    def state(self) -> State:
        """Raises ValueError where `mine` is a file, and where the notes in it cannot be read."""
        file = self.folder / ".course.json"
        if self.folder.is_file():
            raise ValueError(t("{folder} is a file where your folder has to be: move it away", folder=self.folder))
        try:
            if not file.is_file():
                is_new = not (self.folder / PACKAGE).is_dir()
                is_fresh = (self.folder / ".base").is_dir() and not self.outdated()  # the notes alone are gone
                return State(changes=len(self.course.changes) if is_new or is_fresh else 0)
            return State(**json.loads(file.read_text(encoding="utf-8")))
        except (ValueError, TypeError) as error:
            said = "{file} is damaged: delete it, and start your milestones again (nothing that you wrote is lost)"
            raise ValueError(t(said, file=file)) from error

    def save(self, state: State) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / ".course.json").write_text(json.dumps(asdict(state), indent=1))

    def outdated(self) -> list[Path]:
        """The files here that are copies of what the reference no longer says."""
        stored = self.folder / ".base"
        files = [file.relative_to(stored) for file in sorted(stored.rglob("*.py"))]
        now, there = self.course.root, [path for path in files if (self.folder / path).is_file()]
        return [p for p in there if not (now / p).is_file() or (now / p).read_bytes() != (stored / p).read_bytes()]

    def refuse_outdated(self) -> None:
        """Raise ValueError where the reference has changed since a file here was copied: the two do not fit each other."""
        if old := self.outdated():
            said = "the reference has changed since {file} was copied: python -m milestones update"
            raise ValueError(t(said, file=self.folder / old[0]))

    def read(self, path: Path) -> str | None:
        """The learner's text, None where there is no such file here; ValueError where it is not UTF-8."""
        file = self.folder / path
        try:
            return file.read_text(encoding="utf-8-sig") if file.is_file() else None
        except UnicodeDecodeError as error:
            said = "{file} is not UTF-8 text ({reason}): save it as UTF-8"
            raise ValueError(t(said, file=file, reason=error.reason)) from error

    def written(self, exercise: Exercise) -> bool:
        """True once no symbol of the exercise is a stub here; what is not here at all is the reference's, not written."""
        return not (self.absent(exercise) or self.broken(exercise) or self.blanks(exercise))

    def broken(self, exercise: Exercise) -> str:
        """Where, and why, the first file of the exercise that is here is no Python; empty if all are."""
        paths = dict.fromkeys(symbol.path for symbol in exercise.symbols)
        return next(filter(None, (self._unparsed(path) for path in paths)), "")

    def refuse_broken(self) -> None:
        """Raise ValueError where a file here is no Python: nothing could be imported."""
        for file in sorted((self.folder / PACKAGE).rglob("*.py")):
            if said := self._unparsed(file.relative_to(self.folder)):
                raise ValueError(said)

    def _unparsed(self, path: Path) -> str:
        error = syntax_error(self.read(path) or "")
        said = "{file}:{line} does not parse: {reason}"
        return t(said, file=self.folder / path, line=error.lineno, reason=error.msg) if error else ""

    def absent(self, exercise: Exercise) -> list[Path]:
        """The files of the exercise that are not here: the reference's run."""
        return [symbol.path for symbol in exercise.symbols if not (self.folder / symbol.path).is_file()]

    def missing(self, exercise: Exercise) -> str:
        """What to do about a file that `start` brought and that is gone; empty if there is none."""
        absent = self.absent(exercise)
        if not absent or exercise.milestone not in self.state.started:
            return ""
        said = "{file} is missing from mine/: `python -m milestones start {id}` brings it back"
        return t(said, file=absent[0], id=exercise.milestone)

    def blanks(self, exercise: Exercise) -> list[str]:
        """The symbols of the exercise that are stubs here."""
        return [symbol.name for symbol in exercise.symbols if self.is_blank(symbol, exercise)]

    def is_blank(self, symbol: Symbol, exercise: Exercise) -> bool:
        """A file that does not parse is looked at as text: a learner in the middle of a line has not written it yet."""
        text = self.read(symbol.path)
        return text is not None and any(splice.stub_text(id, symbol.name) in text for id in exercise.ids)

    def where(self, exercise: Exercise) -> str:
        """`path:line` of the exercise's first symbol that is a stub here, else of its first."""
        return self.line(next((s for s in exercise.symbols if self.is_blank(s, exercise)), exercise.symbols[0]))

    def line(self, symbol: Symbol) -> str:
        """`path:line` of a symbol as the learner has it."""
        file = self.folder / symbol.path
        try:
            return f"{file}:{splice.find(self.read(symbol.path) or '', symbol.name).line}"
        except (LookupError, SyntaxError):
            return str(file)

    # -- commands --------------------------------------------------------------------------------------------------

    def start(self, id: str) -> list[str]:
        """Bring in the files of a milestone. What was written, or cut out before, is not touched. Says what it did."""
        milestone, state, done = self.course.milestone(id), self.state, []
        for path, own in by_file(milestone.exercises).items():
            reference, text = self.course.source(path), self.read(path)
            begun = [id, *state.started] if text is None else [id]  # a file that is gone had earlier stubs, too
            onwards = by_file(self.course.onwards(*begun))[path]
            stubs = names(onwards, path)
            if text is None:
                self.write(path, splice.blank(reference, stubs), base=reference)
                done.append(t("{path}: new, {todo}", path=path, todo=self._todo(stubs, milestone)))
            else:
                stubs = {n: e for n, e in stubs.items() if self._untouched(path, n, text, reference, state)}
                if stubs:
                    self.backup(path)
                    self.write(path, splice.blank(text, stubs))
                todo = [name for exercise in own for name in self.blanks(exercise) if name in names(own, path)]
                left = "left as it is, to write: {names}" if todo else "left as it is"
                said = t("{names} cut out" if stubs else left, names=", ".join(stubs or todo))
                done.append(t("{path}: there already, {said}", path=path, said=said))
            cut = {str(s) for e in onwards for s in e.symbols if s.path == path and s.name in stubs}
            state.blanked = sorted({*state.blanked, *cut})
        state.started = sorted({*state.started, id})
        self.save(state)
        return done + [line for notebook in milestone.notebooks for line in self._copy_notebook(notebook)]

    def reset(self, exercise: Exercise) -> Path:
        """Cut the exercise out again; what was written goes to the returned backup folder."""
        folder = self._put(exercise, lambda s: splice.blank(self.base(s.path), {s.name: exercise.id}))
        state = self.state
        state.passed = [id for id in state.passed if id != exercise.milestone]
        state.failed = [id for id in state.failed if id != exercise.id]
        self.save(state)
        return folder

    def paste(self, exercise: Exercise) -> Path:
        """Put the reference's answer in; what was there goes to the returned backup folder."""
        return self._put(exercise, lambda s: self.base(s.path))

    # -- how -------------------------------------------------------------------------------------------------------

    def _todo(self, stubs: Mapping[str, str], milestone: Milestone) -> str:
        """How many bodies are cut out, those of what comes after the milestone apart."""
        owners = [self.course.milestone(exercise.partition(".")[0]) for exercise in stubs.values()]
        later = sum(owner.is_after(milestone) for owner in owners)
        said = "{n} to write, {later} more for later milestones" if later else "{n} to write"
        return t(said, n=len(stubs) - later, later=later)

    def _untouched(self, path: Path, name: str, text: str, reference: str, state: State) -> bool:
        if str(Symbol(".".join(path.with_suffix("").parts), name)) in state.blanked:
            return False
        try:
            return any(splice.same_body(text, source, name) for source in (self.base(path), reference))
        except (LookupError, SyntaxError):
            return False

    def _put(self, exercise: Exercise, origin: Callable[[Symbol], str]) -> Path:
        """Replace the exercise's functions, whole, by those of `origin`; all files are checked before one is written."""
        texts: dict[Path, str] = {}
        for symbol in exercise.symbols:
            text = texts.get(symbol.path) or self.read(symbol.path)
            if text is None:
                said = "{path} is not in {folder}: start {id} first"
                raise ValueError(t(said, path=symbol.path, folder=self.folder, id=exercise.milestone))
            try:
                texts[symbol.path] = splice.transplant(text, symbol.name, origin(symbol))
            except (LookupError, SyntaxError) as error:
                said = "{file}: {error}. Mend that first"
                raise ValueError(t(said, file=self.folder / symbol.path, error=error)) from error
        folder = self.backup(*texts)
        for path, text in texts.items():
            self.write(path, text)
        return folder

    def base(self, path: Path) -> str:
        base = self.folder / ".base" / path
        return base.read_text(encoding="utf-8") if base.is_file() else self.course.source(path)

    def write(self, path: Path, text: str, base: str | None = None) -> None:
        for file, content in ((self.folder / path, text), (self.folder / ".base" / path, base)):
            if content is not None:
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(content, encoding="utf-8")

    def backup(self, *paths: Path) -> Path:
        folder = self.folder / ".backup" / datetime.now().strftime("%Y%m%d-%H%M%S-%f")
        for path in paths:
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes((self.folder / path).read_bytes())
        return folder

    def _copy_notebook(self, notebook: str) -> list[str]:
        source, copy = self.course.root / notebook, self.folder / Path(notebook).name
        if not source.is_file() or copy.exists():
            return []
        ours = source.parent / language() / source.name  # a folder deeper than the copy
        text = ours.read_text("utf-8").replace("](../../", "](../") if ours.is_file() else source.read_text("utf-8")
        cells = json.loads(text)
        for cell in cells["cells"]:
            if cell["cell_type"] == "code":
                cell |= {"outputs": [], "execution_count": None}
        copy.write_text(json.dumps(cells, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        return [t("{name}: copied, without its outputs", name=copy.name)]


@cache
def syntax_error(text: str) -> SyntaxError | None:
    """Why a text is no Python; None if it is."""
    try:
        ast.parse(text)
    except SyntaxError as error:
        return error
    return None


def mutated(reference: str, symbol: Symbol, answer: WrongAnswer) -> str:
    """The reference with the body that a wrong answer has for the symbol, where it has one."""
    if symbol.name not in dict(splice.functions(answer.source)):
        return reference
    return splice.graft(reference, symbol.name, answer.source)


def write_variant(
    course: Course,
    folder: Path,
    blanked: Iterable[Exercise] = (),
    wrong: Iterable[WrongAnswer] = (),
    whole: bool = False,
) -> Path:
    """A `mine/` for machines: the reference but for these blanks and wrong answers. `whole` brings all exercises' files."""
    blanked, wrong = list(blanked), list(wrong)
    (folder / PACKAGE).mkdir(exist_ok=True)  # also where nothing is blank
    touched = course.exercises if whole else [*blanked, *(w.exercise for w in wrong)]
    for path, exercises in by_file(touched).items():
        text = course.source(path)
        for answer in wrong:
            for symbol in (s for s in answer.exercise.symbols if s.path == path):
                text = mutated(text, symbol, answer)
        text = splice.blank(text, names((e for e in exercises if e in blanked), path))
        Mine(course, folder).write(path, text)
    return folder


def by_file(exercises: Iterable[Exercise]) -> dict[Path, list[Exercise]]:
    files: dict[Path, list[Exercise]] = defaultdict(list)
    for exercise in exercises:
        for path in dict.fromkeys(symbol.path for symbol in exercise.symbols):
            files[path].append(exercise)
    return files


def names(exercises: Iterable[Exercise], path: Path) -> dict[str, str]:
    """Qualified name: exercise, of the symbols in one file."""
    return {symbol.name: exercise.id for exercise in exercises for symbol in exercise.symbols if symbol.path == path}
