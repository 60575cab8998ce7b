"""The order of things in one turn of the overlapped loop, with a scheduler and a device that only keep a log."""

from typing import Any

import pytest

from folovllm.engine.overlap import OverlappedEngine
from folovllm.step.schedule import SchedulerOutput
from tests.tiny import worked_case


class Script:
    """What the scheduler says, turn by turn: the steps' names ("" is nothing to do), and where it must wait."""

    def __init__(self, log: list[str], steps: list[str], waits: set[int]) -> None:
        self.log, self.steps, self.waits, self.turn = log, steps, waits, -1

    def must_wait(self) -> bool:
        self.turn += 1
        return self.turn in self.waits

    def schedule(self) -> SchedulerOutput:
        name = self.steps[self.turn]
        self.log.append(f"schedule {name}".strip())
        return SchedulerOutput((name,) if name else ())


class Loop(OverlappedEngine):
    """The real loop over a script; requests are finished when the turns are over, or with the tokens of the step `last`."""

    def __init__(self, steps: list[str], waits: set[int], turns: int, last: str = "") -> None:
        self.log: list[str] = []
        self.scheduler: Any = Script(self.log, steps, waits)
        self.core: Any = None
        self._in_flight: Any = None
        self._turns, self._last = turns, f"collect {last}"

    def has_unfinished_requests(self) -> bool:
        return self.scheduler.turn + 1 < self._turns and self._last not in self.log

    def _start(self, schedule: SchedulerOutput) -> Any:
        name = schedule.scheduled_seqs[0]
        self.log.append(f"start {name}")
        return name

    def _collect(self) -> list[Any]:
        if self._in_flight is None:
            return []
        name, self._in_flight = self._in_flight, None
        self.log.append(f"collect {name}")
        return [f"out {name}"]


def run(*steps: str, waits: set[int] = frozenset(), turns: int = 0) -> tuple[list[str], list[list[Any]], Loop]:
    """All turns: the log, what each turn returned, and the loop."""
    loop = Loop(list(steps), waits, turns or len(steps))
    return loop.log, [loop.step_overlapped() for _ in steps], loop


class TestStepOverlapped:
    def test_a_worked_case(self) -> None:
        """Five turns, one with nothing to schedule; c must wait for b's tokens, and after d nobody is left."""
        log, outputs, _ = run("a", "b", "c", "", "d", waits={2})
        expected = [
            *("schedule a", "start a"),
            *("schedule b", "start b", "collect a"),
            *("collect b", "schedule c", "start c"),
            *("schedule", "collect c"),
            *("schedule d", "start d", "collect d"),
        ]
        returned = [[], ["out a"], ["out b"], ["out c"], ["out d"]]
        says = "start the next step, then take in the one before; c first waits; the last is not left behind"
        worked_case("m6.4", {"log": log, "returned": outputs}, {"log": expected, "returned": returned}, says)

    def test_what_was_taken_in_may_have_ended_the_last_request(self) -> None:
        loop = Loop(["a", "b"], set(), turns=9, last="a")
        outputs = [loop.step_overlapped() for _ in range(2)]
        assert loop.log[-2:] == ["collect a", "collect b"] and loop._in_flight is None, (
            "a's tokens end the last request, so nobody calls again: whether one is left is asked after they are taken in"
        )
        assert outputs[-1] == ["out a", "out b"], "both steps are handed out, in their order"

    def test_nothing_at_all_is_nothing(self) -> None:
        assert run("")[:2] == (["schedule"], [[]]), "nothing is scheduled, so nothing is started or taken in"

    @pytest.mark.parametrize("waits", [set(), {0}, {1, 2}, {3}, {0, 1, 2, 3, 4}])
    def test_every_step_arrives_once_and_in_order(self, waits: set[int]) -> None:
        log, outputs, _ = run("a", "b", "", "c", "d", waits=waits)
        handed_out = [out for turn in outputs for out in turn]
        assert handed_out == ["out a", "out b", "out c", "out d"], "each step is handed out once, and in order"
        assert sum(entry.startswith("start") for entry in log) == 4, "only steps that do something are started"
