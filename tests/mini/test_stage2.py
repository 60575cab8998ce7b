"""Stage 2: a ragged batch, a slot a sequence, and a decision at every step."""

from hypothesis import given, settings
from hypothesis import strategies as st

from milestones.mini.given.contract import Limits
from tests.mini.conftest import STORIES, Mini, overwritten_asks, random_asks, running_example, slots

SIZES = st.lists(st.tuples(st.integers(1, 20), st.integers(1, 12)), min_size=1, max_size=6)


def test_worked_case(mini: Mini) -> None:
    """A and B start together in step 0, and C joins in step 2 while both run: each step serves all that are there."""
    trace = mini.play(running_example(late=2), slots(3), folder=STORIES)
    ids = [[id for id, _, _ in step.work] for step in trace.steps]
    assert sorted(ids[0]) == ["A", "B"], f"step 0 computes tokens of {ids[0]}: A and B wait, and there is room for both"
    assert sorted(ids[2]) == ["A", "B", "C"], f"step 2 computes tokens of {ids[2]}: C came before it, and there is room"


def test_a_slot_is_free_at_once(mini: Mini) -> None:
    """Two slots, three requests: the third begins in the step after the one in which the shorter of the others ends."""
    trace = mini.play(random_asks([(4, 3), (5, 9), (6, 4)]), slots(2))
    began = next(i for i, step in enumerate(trace.steps) if any(id == "c" for id, _, _ in step.work))
    assert began == 3, f"c begins in step {began}: a is done with steps 0, 1 and 2, so its slot is free for step 3"


def test_first_come_first_served(mini: Mini) -> None:
    trace = mini.play(random_asks([(4, 5), (5, 9), (6, 4), (3, 2)], arrives=[0, 0, 1, 1]), slots(2))
    began = list(dict.fromkeys(id for step in trace.steps for id, _, _ in step.work))
    assert began.index("c") < began.index("d"), "c came before d, and began after it"


def test_no_more_steps_than_the_reference(mini: Mini) -> None:
    sizes = [(5, 20), (9, 4), (3, 7), (12, 15), (6, 2), (8, 11), (4, 9), (10, 3)]
    own, ours = mini.beside(random_asks(sizes), slots(3))
    assert len(own.steps) <= len(ours.steps), f"{len(own.steps)} steps, and the reference takes {len(ours.steps)}"


def test_the_budget_of_a_step(mini: Mini) -> None:
    """Prompts of 9, 9 and 5 tokens, 20 a step: the third waits for step 1. Those that run come before newcomers."""
    trace = mini.play(random_asks([(9, 6), (9, 6), (5, 6), (19, 3)]), Limits(4, 64, 4, 20))
    assert len(trace.steps[0].work) >= 2, f"step 0 computes {trace.steps[0].work}: two prompts of 9 tokens fit into 20"


def test_nobody_overtakes(mini: Mini) -> None:
    """Prompts of 9, 15 and 5 tokens, 20 a step. The second does not fit into step 0: the third waits behind it."""
    trace = mini.play(random_asks([(9, 6), (15, 6), (5, 6)]), Limits(4, 64, 4, 20))
    began = list(dict.fromkeys(id for step in trace.steps for id, _, _ in step.work))
    assert began == ["a", "b", "c"], f"they began in the order {', '.join(began)}, and came in the order a, b, c"


def test_each_running_sequence_is_in_every_step(mini: Mini) -> None:
    trace = mini.play(random_asks([(4, 9), (5, 9), (6, 9)], arrives=[0, 2, 4]), slots(3))
    for number, step in enumerate(trace.steps):
        if step.work:
            idle = step.tables.keys() - {id for id, _, _ in step.work}
            assert not idle, f"step {number} computes nothing of {', '.join(sorted(idle))}, which hold slots"


def test_attention_reads_the_cache(mini: Mini) -> None:
    """Between two steps V of one token in engine.cache becomes something else: what follows comes from there."""
    mini.play(overwritten_asks([(7, 12), (12, 12), (1, 12)], [0, 1, 3], seed=1), slots(3))


@settings(max_examples=8)
@given(SIZES, st.lists(st.integers(0, 9), min_size=6, max_size=6), st.integers(1, 4))
def test_any_requests(mini: Mini, sizes: list[tuple[int, int]], arrives: list[int], max_seqs: int) -> None:
    mini.play(random_asks(sizes, arrives[: len(sizes)]), slots(max_seqs))
