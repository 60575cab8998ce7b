"""Any order of events: blocks add up, and the cache holds exactly the tokens it should."""

from collections import Counter

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from folovllm.cache.block_manager import BlockManager
from folovllm.engine.scheduler import Scheduler, preempt, whole_prompt
from folovllm.request import Sequence, SequenceStatus
from tests.builders.test_block_manager import Machine
from tests.sequences import EOS, make_seq


def assert_blocks_add_up(kv: BlockManager, holders: list[Sequence]) -> None:
    """Reference counts are the tables' entries, a block is free exactly if nobody names it, and no table has holes."""
    named = Counter(block_id for seq in holders for block_id in seq.block_table)
    assert [block.ref_count for block in kv.blocks] == [named[i] for i in range(kv.num_blocks)]
    free = [block.block_id for block in kv._free]
    assert kv.num_free == len(free) == kv.num_blocks - len(named)
    assert not set(free) & set(named)
    for seq in holders:
        assert len(seq.block_table) == -(-seq.num_computed_tokens // kv.block_size)


class BlockManagerMachine(Machine):
    """What any block manager must do, and what this one's counts of holders are for: several sequences may hold a block."""

    component = BlockManager

    @precondition(lambda self: self.seqs)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        """Another sequence begins with the same full blocks, as prefix caching will have it."""
        first = data.draw(st.sampled_from(self.seqs))
        full = first.num_computed_tokens // self.kv.block_size
        if full:
            second = make_seq(first.num_computed_tokens)
            second.start()
            second.block_table = first.block_table[:full]
            second.num_computed_tokens = full * self.kv.block_size
            for block_id in second.block_table:
                self.kv.blocks[block_id].ref_count += 1
            self.seqs.append(second)

    @invariant()
    def blocks_add_up(self) -> None:
        if hasattr(self, "kv"):
            assert_blocks_add_up(self.kv, self.seqs)

    def teardown(self) -> None:
        for seq in getattr(self, "seqs", []):
            self.kv.free(seq)
        if hasattr(self, "kv"):
            assert self.kv.num_free == self.kv.num_blocks


class SchedulerMachine(RuleBasedStateMachine):
    """A scheduler over few blocks, and a cache in which each slot remembers whose token it holds.

    The next token of a sequence depends on its position alone, so a sequence that resumes in the wrong place shows.
    """

    @initialize(block_size=st.integers(1, 4), more=st.integers(0, 6), seats=st.integers(1, 6), priorities=st.booleans())
    def make(self, block_size: int, more: int, seats: int, priorities: bool) -> None:
        self.longest = 20  # tokens of any request: the pool holds at least one
        self.kv = BlockManager(-(-self.longest // block_size) + more, block_size)
        self.scheduler = Scheduler(self.kv, seats, 40, whole_prompt, preempt, priorities)
        self.cache: dict[int, tuple[Sequence, int]] = {}  # slot -> (whose, which token)
        self.seqs: list[Sequence] = []
        self.seats = seats

    @rule(prompt=st.integers(1, 12), answer=st.integers(1, 8), priority=st.integers(0, 2), early=st.booleans())
    def add(self, prompt: int, answer: int, priority: int, early: bool) -> None:
        seq = make_seq(prompt, answer, name=f"r{len(self.seqs)}", priority=priority, ignore_eos=not early)
        self.seqs.append(seq)
        self.scheduler.add(seq)

    @rule(times=st.integers(1, 6))
    def steps(self, times: int) -> None:
        for _ in range(times):
            self.step()

    @precondition(lambda self: self.unfinished())
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.scheduler.abort(data.draw(st.sampled_from(self.unfinished())))

    def unfinished(self) -> list[Sequence]:
        return [seq for seq in self.seqs if not seq.status.is_finished]

    def step(self) -> None:
        ranked = sorted(self.scheduler.running, key=self.scheduler.rank)
        output = self.scheduler.schedule()
        if not output.scheduled_seqs and output.preempted:  # somebody gave way in vain: the next step has the room
            output = self.scheduler.schedule()
        seqs = self.scheduler.sequences(output)
        assert bool(seqs) == bool(self.unfinished()), "somebody always advances"
        assert output.num_tokens <= 40 and len(seqs) <= self.seats
        assert not {seq.seq_id for seq in seqs} & set(output.preempted)
        stayed = [seq for seq in ranked if seq.status is SequenceStatus.RUNNING]
        assert stayed == ranked[: len(stayed)], "somebody lost cache to one who ranks behind"
        for scheduled, seq in zip(output.scheduled_seqs, seqs, strict=True):
            self.write(seq, scheduled.start, scheduled.end)
        for scheduled, seq in zip(output.scheduled_seqs, seqs, strict=True):
            assert self.read(seq) == [(seq, p) for p in range(seq.num_tokens)]
            assert scheduled.num_samples == 1
            assert scheduled.token_ids.tolist() == seq.token_ids[scheduled.start :].tolist()
        self.scheduler.postprocess([(seq, [self.next_token(seq)]) for seq in seqs])

    def write(self, seq: Sequence, start: int, end: int) -> None:
        slots = self.kv.slots(seq.block_table, self.kv.block_size, start, end)
        self.cache |= {int(slot): (seq, p) for slot, p in zip(slots, range(start, end), strict=True)}

    def read(self, seq: Sequence) -> list[tuple[Sequence, int]]:
        return [self.cache[int(s)] for s in self.kv.slots(seq.block_table, self.kv.block_size, 0, seq.num_tokens)]

    @staticmethod
    def next_token(seq: Sequence) -> int:
        return EOS if seq.num_tokens % 7 == 0 else 40 + seq.num_tokens

    @invariant()
    def everything_adds_up(self) -> None:
        if not hasattr(self, "kv"):
            return
        running, waiting = self.scheduler.running, self.scheduler.waiting
        assert_blocks_add_up(self.kv, running)
        assert not set(running) & set(waiting) and set(running) | set(waiting) == set(self.unfinished())
        assert all(seq.status is SequenceStatus.RUNNING for seq in running)
        assert all((seq.status, seq.block_table) == (SequenceStatus.WAITING, []) for seq in waiting)
        assert waiting == sorted(waiting, key=self.scheduler.rank)
        for seq in self.seqs:  # whatever happened on the way, these are its tokens
            answer = range(seq.num_prompt_tokens, seq.num_tokens)
            assert seq.output_token_ids.tolist() == [EOS if n % 7 == 0 else 40 + n for n in answer]

    def teardown(self) -> None:
        if not hasattr(self, "kv"):
            return
        for _ in range(sum(seq.max_tokens for seq in self.seqs)):
            self.step()
        assert not self.unfinished(), "each step gives somebody a token, so all must have ended"
        assert self.kv.num_free == self.kv.num_blocks
        assert all(seq.block_table == [] for seq in self.seqs)


TestBlockManagerMachine = BlockManagerMachine.TestCase
TestBlockManagerMachine.settings = settings(max_examples=60, stateful_step_count=30)
TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=40, stateful_step_count=30)
