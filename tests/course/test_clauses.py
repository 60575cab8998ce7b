"""What a statement says of must, never or a type is held by a test that the exercise runs: `clauses` in `milestone.toml`."""

import ast
import re

import pytest

from milestones import manifest
from milestones.tasks import Exercise
from tests.course.test_exercises import COURSE, each_exercise, found

BINDING = re.compile(
    r"\b(must|never|only|at most|at least|exactly|unsigned|dtype|float32|u?int(8|32|64)|bool)\b|`bytes`", re.IGNORECASE
)


@each_exercise
def test_each_binding_sentence_has_a_test(exercise: Exercise, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOLOVLLM_LANG", "en")
    statement = " ".join(" ".join(COURSE.statements(exercise)).split())
    covered: set[int] = set()
    for quotation, test in exercise.clauses.items():
        assert quotation in statement, f"{exercise.id}: no longer in the statement: {quotation!r}"
        for match in re.finditer(re.escape(quotation), statement):
            covered.update(range(*match.span()))
        assert runs(exercise).count(test) == 1, (
            f"{exercise.id}, {quotation!r}: {test} is no test, or not one, of {exercise.tests}"
        )
    bare = [
        statement[max(0, m.start() - 50) : m.end() + 50]
        for m in BINDING.finditer(statement)
        if m.start() not in covered
    ]
    assert not bare, (
        f"{exercise.id}: no test is named for these words of the statement (`clauses` in milestone.toml): {bare}"
    )


FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def runs(exercise: Exercise) -> list[str]:
    """Each test function that an exercise runs, once for each name by which `clauses` may call it."""
    names = []
    for test in exercise.tests:
        node = found(test)
        for owner in [node, *(n for n in ast.iter_child_nodes(node) if isinstance(n, ast.ClassDef))]:
            within = [owner] if isinstance(owner, FUNCTIONS) else ast.iter_child_nodes(owner)
            own = [n.name for n in within if isinstance(n, FUNCTIONS) and n.name.startswith("test")]
            names += own
            names += [f"{owner.name}::{name}" for name in own if isinstance(owner, ast.ClassDef)]
    return names


def test_an_unknown_key_is_refused() -> None:
    entry = {"id": "m1.1", "title": "", "symbols": ["a:b"], "difficulty": 1, "lines": 1, "clauses": {"must": "test_x"}}
    assert manifest._exercise(dict(entry)).clauses == {"must": "test_x"}
    with pytest.raises(TypeError, match="clause"):
        manifest._exercise({**entry, "clause": {}})
