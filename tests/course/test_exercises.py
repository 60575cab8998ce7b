"""The course's promises, for every exercise that a manifest declares: `-k m3.1` picks one, `-k m3` a milestone."""

import ast
import io
import re
import tomllib
from pathlib import Path

import pytest
from rich.console import Console

from milestones import explain, splice
from milestones.manifest import Course
from milestones.mine import Mine, write_variant
from milestones.tasks import EXERCISE_ID, Exercise, Milestone
from tests.course.farm import Farm, Job, complaint, jobs
from tests.tiny import named, same

pytestmark = pytest.mark.timeout(1200)  # the farm has its own limits, and a job may wait its turn

COURSE = Course(Path(__file__).resolve().parents[2])
each_exercise = pytest.mark.parametrize("exercise", COURSE.exercises, ids=lambda e: e.id)
each_milestone = pytest.mark.parametrize("milestone", COURSE.milestones, ids=lambda m: m.id)


@pytest.mark.parametrize("job", jobs(COURSE), ids=str)
def test_mutant(job: Job, farm: Farm) -> None:
    """Blank: its tests fail with its id. Wrong: they fail. Alone, and with all later ones blank: they pass."""
    if said := complaint(job, farm.result(job)):
        pytest.fail(f"{job}: {said}", pytrace=False)


@each_exercise
def test_symbols(exercise: Exercise, tmp_path: Path) -> None:
    for symbol in exercise.symbols:
        assert symbol.path.name != "__init__.py"
        body = splice.find(COURSE.source(symbol.path), symbol.name).node.body
        assert len(body) > 1, f"{symbol} has no docstring, or nothing else: a learner would not know what to write"
    folder = write_variant(COURSE, tmp_path, [exercise])
    for file in folder.rglob("*.py"):
        compile(file.read_text(), file, "exec")


@each_exercise
def test_tests_exist(exercise: Exercise) -> None:
    for test in exercise.tests:
        assert test.startswith(f"tests/{exercise.id.partition('.')[0]}/")
        assert "[" not in test, f"{test}: name the function, not one of its parameters"
        assert found(test)


@each_exercise
def test_a_worked_case_comes_first(exercise: Exercise) -> None:
    """`-x` stops at the first failure, so that is to be the one whose numbers can be checked by hand."""
    file = exercise.tests[0].partition("::")[0]
    nodes = [found(test) for test in exercise.tests if test.partition("::")[0] == file]
    first = functions_in(nodes[0])[0]
    assert first.lineno == min(functions_in(node)[0].lineno for node in nodes), "first in the file too"
    calls = [n for n in ast.walk(first) if isinstance(n, ast.Call) and ast.unparse(n.func) == "worked_case"]
    assert calls and calls[0].args[0].value.split()[0] == exercise.id, f"{first.name} is no worked case"  # type: ignore[attr-defined]


def found(test: str) -> ast.AST:
    """What a manifest's entry names."""
    file, *names = test.split("::")
    node: ast.AST = ast.parse((COURSE.root / file).read_text())
    for name in names:
        node = next(n for n in ast.iter_child_nodes(node) if getattr(n, "name", "") == name)
    return node


Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions_in(node: ast.AST) -> list[Function]:
    """The test functions of a file or a class, or the function itself."""
    nodes = [node] if isinstance(node, Function) else list(ast.iter_child_nodes(node))
    return [n for n in nodes if isinstance(n, Function) and n.name.startswith("test")]


@each_exercise
def test_each_assert_has_a_sentence(exercise: Exercise) -> None:
    """Of the exercise's tests; `worked_case` has one anyway."""
    for test in exercise.tests:
        for function in functions_in(found(test)):
            asserts = [node for node in ast.walk(function) if isinstance(node, ast.Assert)]
            silent = [node.lineno for node in asserts if node.msg is None]
            assert not silent, f"{test}: lines {silent} do not say what is wrong"


@each_exercise
def test_what_wrong_answers_give_is_stored_and_named(exercise: Exercise) -> None:
    """Whether it is up to date, `test_mutant` says."""
    known = {answer.id: answer for answer in COURSE.wrong_answers(exercise)}
    cases = COURSE.outputs(exercise)
    assert cases, f"python -m tests.course.outputs {exercise.id}"
    for case, outputs in cases.items():
        assert case.split()[0] == exercise.id and set(outputs) <= set(known)
        for name, output in outputs.items():
            twins = [other for other in outputs.values() if same(other, output)]
            assert (f"*{known[name].title}*" in named(case, output)) is (len(twins) == 1)


@each_exercise
def test_three_hints_that_differ(exercise: Exercise) -> None:
    hints = COURSE.hints(exercise)
    assert len(hints) == 3 and len({text for _, text in hints}) == 3
    assert all(heading and text for heading, text in hints)


@each_exercise
def test_remarks_on_the_reference(exercise: Exercise) -> None:
    """Each quotes what stands in the bodies just once, in their order."""
    remarks, shown = COURSE.remarks(exercise), list(explain.commented(COURSE, exercise))
    assert [remark for _, lines in shown for _, found in lines for remark in found] == remarks
    bodies = "\n".join(line for _, lines in shown for line, _ in lines)
    assert [fragment for fragment, _ in remarks if bodies.count(fragment) != 1] == []
    assert 4 <= len(remarks) <= 8 and all(len(text) > 40 for _, text in remarks)
    known = {answer.title for answer in COURSE.wrong_answers(exercise)}
    named = {
        name
        for _, text in remarks
        for name in re.findall(r"\*([^*]+)\*", re.sub("`[^`]*`", "", " ".join(text.split())))
    }
    assert named <= known, f"no wrong answers of these names: {sorted(named - known)}"


def test_remarks_fit_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """80 columns: prose is folded between words."""
    exercise = COURSE.exercise("x1.2")
    console = Console(width=80, file=io.StringIO(), force_terminal=True, color_system=None)
    monkeypatch.setattr(explain, "console", console)
    explain.print_commented(COURSE, exercise)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    words = {word for _, text in COURSE.remarks(exercise) for word in text.split()}
    assert max(map(len, lines)) <= 80 and words <= {word for line in lines for word in line.split()}


@each_exercise
def test_two_wrong_answers_that_fit(exercise: Exercise) -> None:
    answers = COURSE.wrong_answers(exercise)
    assert len(answers) >= 2 and all(answer.why for answer in answers)
    sources = {symbol.name: COURSE.source(symbol.path) for symbol in exercise.symbols}
    for answer in answers:
        names = dict(splice.functions(answer.source))
        assert names and set(names) <= set(sources), f"{answer.file.name} defines {set(names)}, not {set(sources)}"
        for name in names:
            assert not splice.same_body(answer.source, sources[name], name), f"{answer.file.name} is right"
            wrong, right = (splice.find(s, name).node.args for s in (answer.source, sources[name]))
            assert parameters(wrong) == parameters(right), f"{answer.file.name}: {name}"


def parameters(arguments: ast.arguments) -> list[str]:
    return [n.arg for n in ast.walk(arguments) if isinstance(n, ast.arg)]


@each_milestone
def test_pasting_the_answers_gives_the_reference(milestone: Milestone, tmp_path: Path) -> None:
    mine = Mine(COURSE, tmp_path)
    mine.start(milestone.id)
    for exercise in milestone.exercises:
        assert not mine.written(exercise)
        mine.paste(exercise)
        assert mine.written(exercise)
    for path in {symbol.path for exercise in milestone.exercises for symbol in exercise.symbols}:
        later = [s.name for e in COURSE.onwards(milestone.id) for s in e.symbols if s.path == path]
        text = mine.read(path)
        assert text is not None
        for name in later:
            text = splice.transplant(text, name, COURSE.source(path))
        assert text == COURSE.source(path)


@each_milestone
def test_the_manifest_makes_sense(milestone: Milestone) -> None:
    assert milestone.folder.name.startswith(f"{milestone.id}_")
    assert milestone.is_elective == bool(milestone.flags), "a milestone's preset switches on what it adds"
    known = [id for e in milestone.exercises for id in e.ids]
    assert known == [f"{milestone.id}.{n + 1}" for n in range(len(known))]
    for exercise in milestone.exercises:
        assert {*exercise.needs} <= {e.id for e in milestone.exercises}
        assert exercise.symbols and exercise.tests and exercise.difficulty in (1, 2, 3)
        names = [symbol.name for symbol in exercise.symbols]
        assert len({*names}) == len(names), (
            f"{exercise.id}: a wrong answer could not tell two symbols of one name apart"
        )
    manifest = tomllib.loads((milestone.folder / "milestone.toml").read_text("utf-8"))
    for builder in manifest.get("builder", []):
        assert len(manifest["builder"]) == 1 and len(medals := builder["medals"]) == 3
        assert medals in (sorted(medals), sorted(medals, reverse=True)), "bronze, silver and gold"


def test_no_symbol_is_in_two_exercises() -> None:
    symbols = [symbol for exercise in COURSE.exercises for symbol in exercise.symbols]
    assert len({*symbols}) == len(symbols)


@each_milestone
def test_the_manifests_files_exist(milestone: Milestone) -> None:
    for path in (*milestone.notebooks, *milestone.chapters):
        assert (COURSE.root / path).is_file()
    known = {e.id for e in milestone.exercises}
    for file in [f for pattern in ("hints/*", "explain/*", "wrong/*.*") for f in milestone.folder.glob(pattern)]:
        assert re.match(EXERCISE_ID, file.name)[0] in known, f"{file.name} belongs to no exercise"  # type: ignore[index]


@each_milestone
def test_marker_and_readme_say_the_manifests_title(milestone: Milestone) -> None:
    title = milestone.title[0].lower() + milestone.title[1:]
    options = tomllib.loads((COURSE.root / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    assert f"{milestone.id}: {title}" in options["markers"]
    assert f"| **{milestone.id.upper()}** [{title}]({milestone.chapter}) |" in (COURSE.root / "README.md").read_text()
