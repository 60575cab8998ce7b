"""Nobody loses cache to somebody who ranks behind: a long prompt beside short requests that came later."""

import pytest

from folovllm.cache.block_manager import BlockManager
from folovllm.engine.scheduler import Scheduler, preempt
from folovllm.request import Sequence
from tests.sequences import make_seq

LONG, SHORTS, PIECE = 220, 8, 8
STEPS = -(-LONG // PIECE)  # as many as the long prompt needs by itself


def in_pieces(seq: Sequence, budget: int) -> int:
    """A prompt is computed in pieces of 8 tokens, so that it has uncomputed tokens beside others' decodes."""
    return min(seq.num_uncomputed_tokens, budget, PIECE)


def make_scheduler(by_priority: bool) -> Scheduler:
    """Room for 280 tokens: the long prompt, and little beside it."""
    return Scheduler(BlockManager(70, 4), 16, 48, in_pieces, preempt, by_priority)


def step(scheduler: Scheduler) -> tuple[int, ...]:
    """One step; every share that reaches its end draws a token. Returns who lost its cache."""
    output = scheduler.schedule()
    pairs = zip(scheduler.sequences(output), output.scheduled_seqs, strict=True)
    scheduler.postprocess([(seq, [50] * scheduled.num_samples) for seq, scheduled in pairs])
    return output.preempted


@pytest.mark.parametrize("answer", [30, 60, 120])
@pytest.mark.parametrize("first_by", ["arrival", "priority"])
def test_a_long_prompt_never_gives_way_to_younger_decodes(first_by: str, answer: int) -> None:
    """Its first token comes at the same step, however long the others go on."""
    scheduler = make_scheduler(by_priority=first_by == "priority")
    long = make_seq(LONG, name="long", priority=-1)
    shorts = [make_seq(5, answer, name=f"short {i}", ignore_eos=True) for i in range(SHORTS)]
    if first_by == "arrival":
        scheduler.add(long)
    for seq in shorts:
        scheduler.add(seq)
    before = 0 if first_by == "arrival" else 3  # steps that the others had for themselves
    for _ in range(before):
        step(scheduler)
    if first_by == "priority":
        scheduler.add(long)
    lost: set[int] = set()
    steps = 0
    while not long.num_output_tokens:
        lost |= {*step(scheduler)}
        steps += 1
    assert steps == STEPS, f"{LONG} tokens in pieces of {PIECE}: nothing holds the long prompt up"
    assert long.seq_id not in lost, "it is first in rank, and gives way to nobody"
    assert lost, "there was no room for all: some of the short ones gave way"


def test_who_ranks_last_and_needs_room_gives_way_itself() -> None:
    """And the one before it, which has its share already, keeps it."""
    scheduler = Scheduler(BlockManager(6, 4), 16, 48, in_pieces, preempt)
    first, second = make_seq(12, 8, name="first"), make_seq(7, 8, name="second")
    for seq in (first, second):
        scheduler.add(seq)
    assert [step(scheduler) for _ in range(2)] == [(), ()]  # 12 and 8 tokens: 3 and 2 blocks of 6
    assert step(scheduler) == (second.seq_id,), "both need a block, and one is free"
    assert scheduler.running == [first] and first.num_output_tokens == 2
