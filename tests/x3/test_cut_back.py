"""Schedulers with drafts over a device that only remembers: whatever is drafted, it reads what it should."""

import random

import hypothesis.strategies as st
from hypothesis import given, settings

from folovllm.cache.block_manager import BlockManager
from folovllm.cache.prefix_cache import PrefixCachingBlockManager
from folovllm.electives.spec_decode.policy import LengthPolicy
from folovllm.electives.spec_decode.proposer import Proposer, RowState
from folovllm.step.schedule import TokenIds
from tests.sequences import EOS, make_seq
from tests.x3.drafting_loop import Device, Loop, small_scheduler


@settings(max_examples=40)
@given(
    seed=st.integers(0, 1 << 30), num_blocks=st.integers(14, 40), block_size=st.integers(1, 4), k=st.integers(1, 7),
    budget=st.integers(4, 30), caching=st.booleans(),
)  # fmt: skip
def test_no_draft_token_is_ever_read_or_found_again(
    seed: int, num_blocks: int, block_size: int, k: int, budget: int, caching: bool
) -> None:
    """What was cut off is poison, and so is what a block held when it is taken; pools are small enough to preempt."""
    kv = (PrefixCachingBlockManager if caching else BlockManager)(num_blocks, block_size)
    Loop(kv, Device(kv), random.Random(seed), k, budget).run(longest=min(20, num_blocks * block_size))


def test_cut_blocks_are_taken_next() -> None:
    """They hold nothing of use, so they come before all that could be found again."""
    kv = BlockManager(8, 4)
    seq = make_seq(6)
    assert kv.allocate_slots(seq, 6)
    seq.start()
    seq.num_computed_tokens = 6
    assert kv.allocate_slots(seq, 10) and seq.block_table == [0, 1, 2, 3]
    seq.num_computed_tokens = 7
    kv.truncate(seq)
    assert seq.block_table == [0, 1] and kv.num_free == 6
    assert kv.allocate_slots(seq, 5) and seq.block_table == [0, 1, 2]
    kv.truncate(seq)
    kv.truncate(seq)
    assert seq.block_table == [0, 1] and kv.blocks[2].ref_count == 0


def test_right_drafts_behind_the_end_are_told_to_nobody() -> None:
    class Ones(Proposer):
        def propose(self, state: RowState, k: int) -> list[int]:
            return [1] * k

    scheduler = small_scheduler(Ones(), LengthPolicy(3))
    seq = make_seq(3, max_tokens=20)
    scheduler.add(seq)
    scheduler.postprocess([(seq, [1]) for _ in scheduler.schedule().scheduled_seqs])
    (scheduled,) = scheduler.schedule().scheduled_seqs
    assert scheduled.num_samples == 4
    sampled = [1, EOS, 1, 1]
    scheduler.postprocess([(seq, sampled)])
    assert sampled == seq.output_token_ids[1:].tolist() == [1, EOS], "who hears of the step hears of these alone"


def test_who_ends_is_remembered_and_who_is_aborted_is_not() -> None:
    """Whether or not a draft was ever asked for."""
    heard, asked = list[list[int]](), list[int]()

    class Remembers(Proposer):
        def propose(self, state: RowState, k: int) -> list[int]:
            asked.append(state.seq_id)
            return []

        def remember(self, answer: TokenIds, cache_salt: str | None) -> None:
            heard.append(answer.tolist())

    for k in 0, 3:
        scheduler = small_scheduler(Remembers(), LengthPolicy(k))
        seqs = [make_seq(3, max_tokens=n) for n in (3, 5, 20)]
        for seq in seqs:
            scheduler.add(seq)
        for token in range(8):
            running = scheduler.sequences(scheduler.schedule())
            scheduler.postprocess([(seq, [token]) for seq in running])
        scheduler.abort(seqs[2])
        assert bool(asked) == bool(k)
    assert heard == [[0, 1, 2], [0, 1, 2, 3, 4]] * 2
