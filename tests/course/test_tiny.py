"""What a failed worked case says."""

from __future__ import annotations

import pytest
import torch

from milestones.plugin import exercise_in
from tests.tiny import MISSED, named, worked_case

RIGHT, CLOCKWISE = [-25.0, -386.0, 25.0, 228.0], [35.0, 414.0, 5.0, -172.0]


def failure(case: str, got: object, expected: object) -> str:
    with pytest.raises(AssertionError) as caught:
        worked_case(case, got, expected, "a quarter turn")
    return str(caught.value)


def test_what_is_right_passes_up_to_rounding() -> None:
    worked_case("m1.2", torch.tensor(RIGHT) * 1.000001, RIGHT, "a quarter turn")


def test_a_failure_says_what_was_asked_and_shows_both() -> None:
    said = failure("m1.2", [1.0], RIGHT).splitlines()
    assert said[0] == "the worked case of m1.2 comes out otherwise"
    assert said[1:] == ["  by hand:  a quarter turn", f"  expected: {RIGHT}", "  yours:    [1.0]"]


def test_of_two_dicts_it_shows_what_differs() -> None:
    said = failure("m1.2", {"first": [1], "second": 2}, {"first": [1], "second": 3}).splitlines()
    assert said[2:] == ["  second", "    expected: 3", "    yours:    2"]


def test_a_failure_is_not_taken_for_an_unwritten_body() -> None:
    assert exercise_in(AssertionError(failure("m1.2", [1.0], RIGHT)), {"m1.2"}) is None


def test_a_known_mistake_is_named() -> None:
    said = failure("m1.2", torch.tensor(CLOCKWISE), RIGHT)
    assert said.splitlines()[-1].startswith("This is what a known mistake gives, *clockwise*: Turns the other way.")
    assert MISSED["m1.2"] == CLOCKWISE


def test_what_several_mistakes_give_is_nobodys(monkeypatch: pytest.MonkeyPatch) -> None:
    twice = {"m1.2": {"m1.2_clockwise": CLOCKWISE, "m1.2_neighbours": CLOCKWISE}}
    monkeypatch.setattr("milestones.manifest.Course.outputs", lambda self, exercise: twice)
    assert named("m1.2", CLOCKWISE) == ""
