"""Mutants: the named tests on a `mine/` made for the purpose, in children that need not import torch first.

A fork server imports torch, transformers and triton, never folovllm; each job is a child forked from it, with one
thread. A thread of ours waits for each child, so that a crash or a hang is a result like any other.
"""

import gc
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from milestones import builders
from milestones.manifest import Course
from milestones.mine import Mine, write_variant
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
        """The exercise that a wrong answer is to."""
        return self.wrong.partition("_")[0]

    def __str__(self) -> str:
        return f"{self.name}-{self.kind}"


@dataclass(slots=True)
class Result:
    status: int | str  # pytest's, or what happened instead
    outcomes: list[tuple[str, str, str | None]] = field(default_factory=list)  # test, passed/failed/skipped, exercise
    output: str = ""
    missed: dict[str, Any] = field(default_factory=dict)  # worked case: what came out instead


def jobs(course: Course) -> list[Job]:
    """Per exercise: blank, each wrong answer, alone; per milestone: all later exercises blank, the long ones, hence first.

    A milestone of many files has several of the last kind, so that they run side by side and one that hangs is soon known.

    Electives come after every milestone, so all milestones pass while they are blank.
    """
    found = []
    for milestone in course.milestones:
        for e in milestone.exercises:
            common = {"root": course.root, "tests": e.tests}
            found.append(Job("blank", e.id, **common, blanked=(e.id,)))
            found += [Job("wrong", w.id, **common, wrong=w.id) for w in course.wrong_answers(e)]
            rest = [other for other in course.onwards(milestone.id) if other not in needed(course, e)]
            found.append(Job("alone", e.id, **common, blanked=_ids(rest)))
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
    """Runs jobs, as many at a time as there are cores."""

    def __init__(self) -> None:
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload([*PRELOAD, *SERVING, "tests.course.ahead"])
        self.pool = ThreadPoolExecutor(os.cpu_count())
        self.futures: dict[Job, Future[Result]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, where: TracebackType | None) -> None:
        self.pool.shutdown(cancel_futures=True)

    def submit(self, jobs: Iterable[Job]) -> None:
        jobs = list(jobs)
        if not jobs:
            return
        path = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = os.pathsep.join(
            filter(None, [str(ROOT), path])
        )  # where the fork server finds `ahead`
        forkserver.ensure_running()
        del os.environ["PYTHONPATH"]
        if path is not None:
            os.environ["PYTHONPATH"] = path
        self.futures |= {job: self.pool.submit(self._run, job) for job in jobs if job not in self.futures}

    def result(self, job: Job) -> Result:
        self.submit([job])
        return self.futures[job].result()

    def _run(self, job: Job) -> Result:
        ours, theirs = self.context.Pipe(duplex=False)
        child = self.context.Process(target=_child, args=(job, theirs), daemon=False)
        child.start()
        theirs.close()
        limit = LIMIT.get(job.kind, 180)
        try:
            return ours.recv() if ours.poll(limit) else Result(f"still running after {limit} s")
        except EOFError:
            child.join()
            return Result(f"the process died, status {child.exitcode}")
        finally:
            child.kill()
            child.join()
            ours.close()


class _Recorder:
    """Keeps each test's outcome. Where a job asks only what is reached (alone, later), a few examples are as good as many."""

    def __init__(self, kind: str) -> None:
        self.outcomes: list[tuple[str, str, str | None]] = []
        self.few = kind in ("alone", "later")

    def pytest_collection_modifyitems(self, items: "list[pytest.Item]") -> None:  # type: ignore[name-defined]  # noqa: F821
        from hypothesis import settings

        for item in items if self.few else ():
            test = getattr(item, "obj", None)
            test = getattr(test, "__func__", test)
            own = getattr(test, "_hypothesis_internal_use_settings", None)
            if own is not None:
                test._hypothesis_internal_use_settings = settings(own, max_examples=min(own.max_examples, EXAMPLES))

    def pytest_runtest_logreport(self, report: "pytest.TestReport") -> None:  # type: ignore[name-defined]  # noqa: F821
        if report.when == "call" or report.outcome != "passed":
            id = next((str(value) for name, value in report.user_properties if name == "exercise"), None)
            self.outcomes.append((report.nodeid, report.outcome, id))


def _child(job: Job, pipe: Connection) -> None:
    import pytest
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
    os.chdir(job.root)
    sys.path.insert(0, str(job.root))
    recorder = _Recorder(job.kind)
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as log:
        for descriptor in (1, 2):
            os.dup2(log.fileno(), descriptor)
        os.environ["FOLOVLLM_MINE"] = str(_variant(job, Path(folder)))
        words = ["-q", "--no-header", "--tb=native", "--disable-plugin-autoload"]
        words += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
        words += [word for plugin in (*PLUGINS, "no:cacheprovider") for word in ("-p", plugin)]
        words += [] if job.kind == "later" else ["-x"]
        status = pytest.main([*words, *job.tests], plugins=[recorder])
        sys.stdout.flush()
        log.seek(0)
        tiny = sys.modules.get("tests.tiny")
        pipe.send(Result(int(status), recorder.outcomes, log.read(), tiny.MISSED if tiny else {}))
        pipe.close()


def _variant(job: Job, folder: Path) -> Path:
    course = Course(job.root)
    if job.kind == "builder":
        builder, mine = course.builder(job.name.partition("-")[0]), Mine(course, folder)
        wrong = builder.folder / f"wrong/{job.wrong}.py"
        mine.write(builder.path, wrong.read_text("utf-8") if job.wrong else builders.template(builder, course))
        mine.write(builder.path.with_name("reference.py"), builder.reference.read_text("utf-8"))
        return folder
    exercises = [course.exercise(job.exercise)] if job.wrong else []
    answers = [w for e in exercises for w in course.wrong_answers(e) if w.id == job.wrong]
    write_variant(course, folder, [course.exercise(id) for id in job.blanked], answers)
    if job.name.endswith(".builder"):
        builder = course.builder(job.name)
        Mine(course, folder).write(builder.path, builder.reference.read_text("utf-8"))
    return folder


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
