"""Mutants: the named tests on a `mine/` made for the purpose, in children that need not import anything first.

A fork server imports torch, transformers and triton, never folovllm. A child of it loads the engine over the `mine/` of a first
job, and collects the tests. For each job with the same tests it forks: the fork puts the job's bodies into the functions that
are loaded, and runs the tests. A thread of ours waits for each child, so that a crash or a hang is a result like any other.
"""

import contextlib
import gc
import linecache
import multiprocessing
import os
import signal
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import reduce
from multiprocessing.connection import Connection
from pathlib import Path
from types import CodeType, FunctionType, TracebackType
from typing import IO, Any, Self

import pytest

from milestones import builders
from milestones.manifest import Course
from milestones.mine import Mine, by_file, write_variant
from milestones.tasks import Exercise, Symbol
from tests.tiny import same
from tests.warm import PLUGINS, PRELOAD

ROOT = Path(__file__).resolve().parents[2]
LIMIT = {"later": 400}  # seconds; others have 180: Ray's tests run beside them
EXAMPLES = 5
FILES = 8  # whose tests one `later` job runs
SERVING = [
    "msgspec",
    "prometheus_client",
    "pdb",
    "starlette.applications",
    "uvicorn.protocols.http.httptools_impl",
    "uvloop",
]


@dataclass(frozen=True)
class Job:
    """What is blank or wrong, what is run, and, by `kind`, what is to come of it (`complaint`)."""

    kind: str  # blank, wrong, alone or later; builder
    name: str  # of the exercise, wrong answer, milestone or builder
    root: Path
    tests: tuple[str, ...]
    blanked: tuple[str, ...] = ()
    wrong: str = ""  # a wrong answer's id; of a builder a wrong component's name, or nothing: its empty file

    @property
    def exercise(self) -> str:
        """The exercise that a wrong answer is to; else nothing."""
        return self.wrong.partition("_")[0] if self.kind == "wrong" else ""

    def __str__(self) -> str:
        return f"{self.name}-{self.kind}"


@dataclass(slots=True)
class Result:
    status: int | str  # pytest's, or what happened instead
    outcomes: list[tuple[str, str, str | None]] = field(default_factory=list)  # test, passed/failed/skipped, exercise
    output: str = ""
    missed: dict[str, Any] = field(default_factory=dict)  # worked case: what came out instead


def jobs(course: Course) -> list[Job]:
    """Per exercise: alone, blank, each wrong answer; per milestone: all later exercises blank, the long ones, hence first.

    A milestone of many files has several of the last kind, so that they run side by side and one that hangs is soon known.

    Electives come after every milestone, so all milestones pass while they are blank.
    """
    found = []
    for milestone in course.milestones:
        for e in milestone.exercises:
            common = {"root": course.root, "tests": e.tests}
            rest = [other for other in course.onwards(milestone.id) if other not in needed(course, e)]
            found.append(Job("alone", e.id, **common, blanked=_ids(rest)))
            found.append(Job("blank", e.id, **common, blanked=(e.id,)))
            found += [Job("wrong", w.id, **common, wrong=w.id) for w in course.wrong_answers(e)]
        if later := _ids(e for m in course.milestones if m.is_after(milestone) for e in m.exercises):
            parts = _parts(course, milestone.id, later)
            names = [f"{milestone.id}-{n + 1}" for n in range(len(parts))] if len(parts) > 1 else [milestone.id]
            found += [Job("later", name, course.root, part, later) for name, part in zip(names, parts, strict=True)]
    return sorted(found, key=lambda job: job.kind != "later")


def needed(course: Course, exercise: Exercise) -> set[Exercise]:
    """The exercise and all that it needs, directly or not."""
    return {exercise}.union(*(needed(course, course.exercise(id)) for id in exercise.needs))


def builder_jobs(course: Course) -> list[Job]:
    """Per builder: each wrong component, and the file that a learner begins with."""
    return [
        Job("builder", f"{builder.id}-{wrong or 'empty'}", course.root, builder.tests, wrong=wrong)
        for builder in course.builders
        for wrong in ("", *(file.stem for file in builder.wrong))
    ]


def later_jobs(course: Course) -> list[Job]:
    """Per builder: the course's reference of it, while all exercises of later milestones are blank."""
    found = []
    for builder in course.builders:
        own = course.milestone(builder.milestone)
        later = _ids(e for m in course.milestones if m.is_after(own) for e in m.exercises)
        found.append(Job("later", builder.id, course.root, builder.tests, later))
    return found


def complaint(job: Job, result: Result) -> str:
    """What is wrong with the exercise that a job was about; empty if nothing is."""
    failed = [(test, id) for test, outcome, id in result.outcomes if outcome == "failed"]
    passed = [test for test, outcome, _ in result.outcomes if outcome == "passed"]
    says = f"\n{result.output[-4000:]}"
    if result.status not in (0, 1):
        return f"the tests did not run to an end: {result.status}{says}"
    if job.kind in ("alone", "later"):
        return (
            "" if passed and not failed else f"{failed or 'all skipped'} while {', '.join(job.blanked)} are blank{says}"
        )
    if not failed:
        return f"{', '.join(job.tests)} do not notice{says}"
    if job.kind == "blank" and failed[0][1] != job.name:
        return f"{failed[0][0]} fails, but not with {job.name}: a blank exercise is to be reached{says}"
    if job.kind == "wrong" and (unwritten := [id for _, id in failed if id]):
        return f"{unwritten[0]} is said to be unwritten, but it is wrong{says}"
    interpreted = "TRITON_INTERPRET" in os.environ  # on a GPU, what a wrong kernel reads may be anything
    if job.kind == "wrong" and interpreted and not same(result.missed, stored(job)):
        return f"it gives {result.missed} in the worked case: python -m tests.course.outputs {job.exercise}"
    return ""


def stored(job: Job) -> dict[str, Any]:
    """What the job's wrong answer gives in the worked cases, as far as the course knows."""
    course = Course(job.root)
    cases = course.outputs(course.exercise(job.exercise))
    return {case: outputs[job.wrong] for case, outputs in cases.items() if job.wrong in outputs}


class Farm:
    """Runs jobs, as many children at a time as there are cores."""

    def __init__(self) -> None:
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload([*PRELOAD, *SERVING])
        self.pool = ThreadPoolExecutor(os.cpu_count())
        self.futures: dict[Job, Future[Result]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, where: TracebackType | None) -> None:
        self.pool.shutdown(cancel_futures=True)

    def submit(self, jobs: Iterable[Job]) -> None:
        groups = defaultdict[Any, list[Job]](list)
        for job in jobs:
            if job not in self.futures:
                self.futures[job] = Future()
                groups[job.root, job.tests].append(job)
        for group in groups.values():  # the child loads what the first says: not so much is put in afterwards
            self.pool.submit(self._run, sorted(group, key=lambda job: job.kind not in ("alone", "later")))

    def result(self, job: Job) -> Result:
        self.submit([job])
        return self.futures[job].result()

    def _run(self, jobs: list[Job]) -> None:
        ours, theirs = self.context.Pipe(duplex=False)
        child = self.context.Process(target=_child, args=(jobs, theirs), daemon=False)
        child.start()
        theirs.close()
        with contextlib.suppress(EOFError):
            for job in jobs:
                self.futures[job].set_result(ours.recv())
        child.join()
        for job in jobs:
            if not self.futures[job].done():
                self.futures[job].set_result(Result(f"the process died, status {child.exitcode}"))
        ours.close()


class _Forks:
    """pytest's side of a child: the collected tests run once for each job, in a fork. Keeps each test's outcome there."""

    def __init__(self, jobs: list[Job], mine: Mine, log: IO[str], pipe: Connection) -> None:
        self.jobs, self.mine, self.log, self.pipe = jobs, mine, log, pipe
        self.outcomes: list[tuple[str, str, str | None]] = []
        ids = dict.fromkeys(id for job in jobs for id in (*job.blanked, job.exercise) if id)
        self.files = list(by_file(map(mine.course.exercise, ids)))
        self._write(jobs[0])
        self.loaded = {path: mine.read(path) for path in self.files}

    def _write(self, job: Job) -> None:
        for path in self.files:
            self.mine.write(path, self.mine.course.source(path))
        _variant(job, self.mine)

    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        if session.testsfailed or not session.items:
            return None  # pytest says why there is nothing to run
        gc.freeze()
        while self.jobs:
            job = self.jobs.pop(0)
            self._write(job)
            self.pipe.send(self._forked(session, job))
        return True

    def _forked(self, session: pytest.Session, job: Job) -> Result:
        ours, theirs = multiprocessing.Pipe(duplex=False)
        sys.stdout.flush()
        if (fork := os.fork()) == 0:
            with contextlib.suppress(BaseException):
                theirs.send(self._outcome(session, job))
            os._exit(1)
        theirs.close()
        limit, result = LIMIT.get(job.kind, 180), None
        with ours, contextlib.suppress(EOFError):
            result = ours.recv() if ours.poll(limit) else Result(f"still running after {limit} s")
        os.kill(fork, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1])
        return result or Result(f"the process died, status {status}")

    def _outcome(self, session: pytest.Session, job: Job) -> Result:
        from _pytest.main import pytest_runtestloop

        self.log.seek(0)
        self.log.truncate()
        self._put_in()
        session.config.option.maxfail = 0 if job.kind == "later" else 1
        if job.kind in ("alone", "later"):
            _give_few_examples(session.items)
        with contextlib.suppress(session.Failed):
            pytest_runtestloop(session)
        status = int(session.testsfailed > 0)
        session.config.hook.pytest_sessionfinish(session=session, exitstatus=status)
        tiny = sys.modules.get("tests.tiny")
        return Result(status, self.outcomes, _read(self.log), tiny.MISSED if tiny else {})

    def _put_in(self) -> None:
        """Give the loaded functions what now stands in `mine/`: bodies, and lines. What is not loaded will be read from there."""
        linecache.clearcache()
        for path, loaded in self.loaded.items():
            module, text = sys.modules.get(".".join(path.with_suffix("").parts)), self.mine.read(path) or ""
            if module and text != loaded:
                for name, body in _codes(compile(text, self.mine.folder / path, "exec")):
                    with contextlib.suppress(AttributeError):  # of a lambda, a comprehension, a function in a function
                        _give_body(reduce(getattr, name.split("."), module), body)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            id = next((str(value) for name, value in report.user_properties if name == "exercise"), None)
            self.outcomes.append((report.nodeid, report.outcome, id))


def _give_body(function: Any, body: CodeType) -> None:
    """Of a Triton kernel, too: interpreted it reads its source when it runs, compiled for a GPU it has read it already."""
    plain = getattr(function, "fn", function)
    if isinstance(plain, FunctionType) and plain.__code__.co_filename == body.co_filename:
        plain.__code__ = body
        if hasattr(function, "_unsafe_update_src"):
            function._unsafe_update_src(type(function)(plain).src)


def _codes(code: CodeType) -> Iterator[tuple[str, CodeType]]:
    """All functions in a module's code, by their qualified names."""
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield inner.co_qualname, inner
            yield from _codes(inner)


def _give_few_examples(items: list[pytest.Item]) -> None:
    """Where a job asks only what is reached, a few examples are as good as many."""
    from hypothesis import settings

    for item in items:
        test = getattr(item, "obj", None)
        test = getattr(test, "__func__", test)
        own = getattr(test, "_hypothesis_internal_use_settings", None)
        if own is not None:
            test._hypothesis_internal_use_settings = settings(own, max_examples=min(own.max_examples, EXAMPLES))


def _read(log: IO[str]) -> str:
    sys.stdout.flush()
    log.seek(0)
    return log.read()


def _child(jobs: list[Job], pipe: Connection) -> None:
    import torch
    from _pytest.config import PytestPluginManager
    from hypothesis.internal.conjecture import providers

    nothing = providers.Constants()
    providers._get_local_constants = lambda: nothing  # which it would collect from the text of all modules
    PytestPluginManager.load_setuptools_entrypoints = lambda *words, **named: (
        0
    )  # all plugins are named: nothing to look for
    gc.freeze()  # pytest collects garbage at its end, five times over: not over all that was there before
    assert "folovllm" not in sys.modules, "the fork server must not know the engine"
    torch.set_num_threads(1)
    os.chdir(jobs[0].root)
    sys.path.insert(0, str(jobs[0].root))
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as log:
        for descriptor in (1, 2):
            os.dup2(log.fileno(), descriptor)
        forks = _Forks(jobs, Mine(Course(jobs[0].root), Path(folder)), log, pipe)
        os.environ["FOLOVLLM_MINE"] = folder
        words = ["-q", "--no-header", "--tb=native", "--disable-plugin-autoload"]
        words += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
        words += [word for plugin in (*PLUGINS, "no:cacheprovider") for word in ("-p", plugin)]
        status = pytest.main([*words, *jobs[0].tests], plugins=[forks])
        for _ in jobs:
            pipe.send(Result(int(status), output=_read(log)))
        pipe.close()


def _variant(job: Job, mine: Mine) -> None:
    """Write what is blank or wrong."""
    course = mine.course
    if job.kind == "builder":
        builder = course.builder(job.name.partition("-")[0])
        wrong = builder.folder / f"wrong/{job.wrong}.py"
        mine.write(builder.path, wrong.read_text("utf-8") if job.wrong else builders.template(builder, course))
        mine.write(builder.path.with_name("reference.py"), builder.reference.read_text("utf-8"))
        return
    exercises = [course.exercise(job.exercise)] if job.exercise else []
    answers = [w for e in exercises for w in course.wrong_answers(e) if w.id == job.wrong]
    write_variant(course, mine.folder, [course.exercise(id) for id in job.blanked], answers)
    if job.name.endswith(".builder"):
        builder = course.builder(job.name)
        mine.write(builder.path, builder.reference.read_text("utf-8"))


def _parts(course: Course, id: str, later: tuple[str, ...]) -> list[tuple[str, ...]]:
    """A milestone's tests in parts of at most `FILES` files each; what earlier folders have of them goes with the first.

    Where all that comes `later` are electives, only the files that name one of their packages (of a package that milestones
    have exercises in, their module), or the first of all: the others ask for nothing that an elective serves. They took as long as those of all other milestones together.
    """
    *earlier, own = course.tests(id)
    found = sorted((course.root / own).glob("test_*.py"))
    if all(exercise.startswith("x") for exercise in later):
        symbols = [symbol for exercise in later for symbol in course.exercise(exercise).symbols]
        shared = {_package(s) for e in course.exercises if e.id.startswith("m") for s in e.symbols}
        names = {s.module if _package(s) in shared else _package(s) for s in symbols}
        found = [file for file in found if any(name in file.read_text("utf-8") for name in names)] or found[:1]
    files = [str(file.relative_to(course.root)) for file in found]
    count = -(-len(files) // FILES)
    first, *rest = (files[i::count] for i in range(count))  # long ones stand side by side in the alphabet
    return [(*earlier, *first), *((*earlier[:2], *part) for part in rest)]


def _package(symbol: Symbol) -> str:
    return symbol.module.rpartition(".")[0]


def _ids(exercises: Iterable[Exercise]) -> tuple[str, ...]:
    return tuple(e.id for e in exercises)
