"""The worked case that an exercise's tests begin with: small enough to check by hand, and it knows the usual mistakes.

What each wrong answer of the course gives in the worked case is stored beside it, in `milestones/*/wrong/<exercise>.json`
(written by `python -m tests.course.outputs`). So a failure can say which mistake has these numbers.
"""

import math
from pathlib import Path
from typing import Any

from milestones.manifest import Course

COURSE = Course(Path(__file__).resolve().parents[1])
MISSED: dict[str, Any] = {}  # case: what came out in this process instead, for the command that stores it


def worked_case(case: str, got: object, expected: object, says: str) -> None:
    """Fail with the sentence `says` and both values unless `got` is `expected`; name the mistake that gives `got`.

    `case` is the exercise's id, with a word behind it where the exercise has several cases. The values are numbers,
    strings, None, tensors, arrays, and lists, tuples, sets and dicts of them. Of two dicts, which have the same keys,
    what differs is shown.
    """
    __tracebackhide__ = True
    got, expected = plain(got), plain(expected)
    if not same(got, expected):
        MISSED[case] = got
        # Not "m1.2: ...", which is how an unwritten body speaks (`milestones.plugin.exercise_in`).
        says = f"the worked case of {case} comes out otherwise\n  by hand:  {says}"
        raise AssertionError(f"{says}{differences(got, expected)}{named(case, got)}")


def differences(got: Any, expected: Any) -> str:
    """Both, or of two dicts what differs."""
    if not isinstance(expected, dict):
        return f"\n  expected: {expected}\n  yours:    {got}"
    different = [key for key in expected if not same(got[key], expected[key])]
    return "".join(f"\n  {key}\n    expected: {expected[key]}\n    yours:    {got[key]}" for key in different)


def named(case: str, got: object) -> str:
    """A sentence about the one wrong answer that has this output; empty if none has it, or several have."""
    exercise = COURSE.exercise(case.split()[0])
    known = COURSE.outputs(exercise).get(case, {})
    found = [answer for answer in COURSE.wrong_answers(exercise) if answer.id in known and same(known[answer.id], got)]
    if len(found) != 1:
        return ""
    return f"\nThis is what a known mistake gives, *{found[0].title}*: {' '.join(found[0].why.split())}"


def plain(value: Any) -> Any:
    """As JSON has it: tensors, tuples and sets as lists, floats with six digits, those that are no number as words."""
    if hasattr(value, "tolist"):  # a tensor, an array, or a number out of one
        return plain(value.tolist())
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted(map(plain, value))
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else str(value)
    if value is None or isinstance(value, bool | int | str):
        return value
    raise TypeError(f"a worked case cannot store {value!r}")


def same(one: Any, other: Any) -> bool:
    """Equal, but for the rounding of floats. True is not 1."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-4, abs_tol=1e-5)
    return type(one) is type(other) and bool(one == other)
