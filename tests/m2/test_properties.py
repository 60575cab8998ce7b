"""Whatever arrives, in whatever order: budgets hold, slots have one owner, nobody starves, everybody ends once."""

from __future__ import annotations

import random
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from folovllm.cache.slot_manager import SlotManager
from folovllm.engine.scheduler import Scheduler, wait, whole_prompt
from folovllm.request import Sequence, SequenceStatus
from folovllm.step.schedule import SchedulerOutput
from tests.sequences import EOS, make_seq

CONTEXT = 12  # tokens a slot holds


@dataclass(frozen=True)
class User:
    """Asks at step `at` and may lose patience `gives_up` steps later."""

    at: int
    prompt: int
    answer: int
    priority: int
    gives_up: int | None


users = st.lists(
    st.builds(
        User,
        at=st.integers(0, 20),
        prompt=st.integers(1, 8),
        answer=st.integers(1, CONTEXT - 8),
        priority=st.integers(0, 2),
        gives_up=st.none() | st.integers(0, 10),
    ),
    max_size=12,
)


class World:
    """A scheduler with slots and no model: tokens come from a die, and every promise is checked at every step."""

    def __init__(self, max_num_seqs: int, slots: int, budget: int, by_priority: bool, die: random.Random) -> None:
        self.kv = SlotManager(slots, CONTEXT)
        self.limits = (min(max_num_seqs, slots), budget)
        self.scheduler = Scheduler(self.kv, max_num_seqs, budget, whole_prompt, wait, by_priority)
        self.die = die
        self.ends: dict[Sequence, int] = {}  # how often each one ended
        self.admitted: list[Sequence] = []

    def step(self) -> None:
        before, queue = list(self.scheduler.running), list(self.scheduler.waiting)
        output = self.scheduler.schedule()
        seqs = self.scheduler.sequences(output)
        self.check_step(output, seqs, before, queue)
        updated = self.scheduler.postprocess([(seq, [self.token()]) for seq in seqs])
        assert updated == seqs  # whole prompts: every share draws
        for seq in updated:
            if seq.status.is_finished:
                self.ended(seq)
        self.check_slots()

    def token(self) -> int:
        return EOS if self.die.random() < 0.1 else self.die.randrange(50)

    def check_step(
        self, output: SchedulerOutput, served: list[Sequence], before: list[Sequence], queue: list[Sequence]
    ) -> None:
        most_seqs, budget = self.limits
        joined = [seq for seq in self.scheduler.running if seq not in before]
        assert joined == queue[: len(joined)], "overtaken"
        assert queue == sorted(queue, key=self.scheduler.rank)
        assert output.num_tokens <= budget and len(self.scheduler.running) <= most_seqs
        assert len(set(served)) == len(served) and len({scheduled.row for scheduled in output.scheduled_seqs}) == len(
            served
        )
        assert served or not (before or queue), "there was work, and nobody did it"
        pairs = zip(output.scheduled_seqs, served, strict=True)
        singles = [scheduled.num_new_tokens == 1 for scheduled, seq in pairs if seq in before]
        assert singles == sorted(singles, reverse=True)
        if len(before) <= budget:
            assert set(served) == {*before, *joined}
        self.admitted += joined

    def check_slots(self) -> None:
        owned = [slot for seq in self.scheduler.running for slot in seq.block_table]
        assert len(owned) == len(set(owned)) == len(self.scheduler.running) == self.kv.num_blocks - self.kv.num_free
        assert all(seq.status is SequenceStatus.RUNNING for seq in self.scheduler.running)
        assert all(seq.num_tokens <= CONTEXT for seq in self.scheduler.running)
        assert not any(seq.block_table for seq in self.scheduler.waiting)

    def ended(self, seq: Sequence) -> None:
        self.ends[seq] = self.ends.get(seq, 0) + 1
        assert seq.block_table == []


@settings(max_examples=80)
@given(
    users, st.integers(1, 5), st.integers(1, 5), st.integers(CONTEXT, 3 * CONTEXT), st.booleans(), st.integers(0, 99)
)
def test_everybody_is_served_once(
    wanted: list[User], max_num_seqs: int, slots: int, budget: int, by_priority: bool, seed: int
) -> None:
    world = World(max_num_seqs, slots, budget, by_priority, random.Random(seed))
    seqs: list[tuple[User, Sequence]] = []
    work = sum(user.answer for user in wanted)  # each step gives at least one token to somebody
    for now in range(21 + work):
        for user in wanted:
            if user.at == now:
                seqs.append((user, make_seq(user.prompt, user.answer, str(len(seqs)), user.priority)))
                world.scheduler.add(seqs[-1][1])
        for user, seq in seqs:
            if user.gives_up is not None and now == user.at + user.gives_up and not seq.status.is_finished:
                world.scheduler.abort(seq)
                world.ended(seq)
        world.step()
    assert [world.ends.get(seq) for _, seq in seqs] == [1] * len(wanted)
    assert not world.scheduler.waiting and not world.scheduler.running and world.kv.num_free == slots
    if not by_priority:
        arrivals = [seq.seq_id for seq in world.admitted]
        assert arrivals == sorted(arrivals)
