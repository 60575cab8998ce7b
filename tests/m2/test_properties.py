"""Whatever arrives, in whatever order: budgets hold, slots have one owner, nobody starves, everybody ends once."""

from dataclasses import dataclass
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from folovllm.engine.scheduler import Scheduler, wait
from folovllm.request import Sequence
from tests.builders.test_scheduler import Bench

LONGEST = 12  # tokens of a prompt and its answer


@dataclass(frozen=True)
class User:
    """Asks at step `at` and may lose patience `gives_up` steps later."""

    at: int
    prompt: int
    answer: int
    priority: int
    gives_up: int | None


users = st.lists(st.builds(
    User, at=st.integers(0, 20), prompt=st.integers(1, 8), answer=st.integers(1, LONGEST - 8), priority=st.integers(0, 2),
    gives_up=st.none() | st.integers(0, 10),
), max_size=12)  # fmt: skip


class World(Bench):
    """What any scheduler must do at every step, and the order that this one promises."""

    def step(self) -> list[Sequence]:
        self.before, queue = list(self.scheduler.running), list(self.scheduler.waiting)
        assert queue == sorted(queue, key=self.scheduler.rank)
        served = super().step()
        joined = [seq for seq in served if seq not in self.before]
        assert set(joined) == set(queue[: len(joined)]), "overtaken"
        if len(self.before) <= self.budget:
            assert set(served) == {*self.before, *joined}
        return served

    def check_order(self, counts: list[int], seqs: list[Sequence]) -> None:
        """A new prompt of one token may stand behind a longer one."""
        super().check_order([count for count, seq in zip(counts, seqs, strict=True) if seq in self.before], seqs)


@settings(max_examples=80)
@given(users, st.integers(1, 5), st.integers(1, 5), st.integers(LONGEST, 3 * LONGEST), st.booleans())
def test_all_are_served_once(wanted: list[User], max_num_seqs: int, slots: int, budget: int, by_priority: bool) -> None:
    def scheduler(*given: Any) -> Scheduler:
        return Scheduler(*given, wait, by_priority)

    world = World(scheduler, slots, max_num_seqs, budget)
    seqs: list[tuple[User, Sequence]] = []
    work = sum(user.answer for user in wanted)  # each step gives at least one token to somebody
    for now in range(21 + work):
        for user in wanted:
            if user.at == now:
                seqs.append((user, world.add(user.prompt, user.answer, priority=user.priority)))
        for user, seq in seqs:
            if user.gives_up is not None and now == user.at + user.gives_up and not seq.status.is_finished:
                world.scheduler.abort(seq)
        world.step()
    assert len(seqs) == len(wanted) and not world.unfinished() and world.kv.num_free == slots
    world.run()
