"""Stage 3: block tables, and who gives way when memory is full."""

from hypothesis import given, settings
from hypothesis import strategies as st

from milestones.mini.given.contract import Limits
from tests.mini.conftest import STORIES, Mini, overwritten_asks, random_asks, running_example

SIZES = st.lists(st.tuples(st.integers(1, 20), st.integers(1, 12)), min_size=1, max_size=6)
TWELVE = [(8 + i % 5, 12 + 2 * (i % 4)) for i in range(12)]  # at most 30 tokens each


def test_worked_case(mini: Mini) -> None:
    """5 tokens in blocks of 4 need 2 blocks. The answer's tokens fill the second; token 8, computed in step 4, needs a third."""
    trace = mini.play(random_asks([(5, 6)]), Limits(8, 4, 4, 64))
    held = [len(step.tables["a"]) for step in trace.steps if step.work]
    assert held == [2, 2, 2, 2, 3, 3], f"blocks held, step by step: {held}"


def test_the_running_example(mini: Mini) -> None:
    """A, B and C in ten blocks of four tokens."""
    mini.play(running_example(late=2), Limits(10, 4, 3, 64), folder=STORIES)


def test_they_give_way_and_come_back(mini: Mini) -> None:
    """Three requests of 24 tokens in the end, memory for two: the last to arrive gives way, and loses only time."""
    trace = mini.play(random_asks([(8, 16), (8, 16), (8, 16)]), Limits(12, 4, 3, 64))
    given = [id for step in trace.steps for id in step.preempted]
    assert given, (
        "nobody was preempted, though three sequences of 24 tokens do not fit into 48: they ran one after the other"
    )
    when = next((i for i, step in enumerate(trace.steps) if "a" in step.preempted), None)
    assert when is None, f"step {when} preempts a, which came first: who came last gives way"


def test_it_comes_back_before_those_that_never_ran(mini: Mini) -> None:
    """c has waited since step 0, and b gives way: b comes back first."""
    trace = mini.play(random_asks([(8, 16), (8, 16), (8, 8)]), Limits(8, 4, 2, 64))
    gone = next(i for i, step in enumerate(trace.steps) if step.preempted)
    late = [id for step in trace.steps[gone:] for id, _, n in step.work if n > 1]
    assert late[0] == "b", f"b gave way in step {gone}, and {late[0]} was let in before it"


def test_alone_it_fills_the_memory(mini: Mini) -> None:
    """One request of 16 tokens, 15 of which are ever stored, and four blocks of four."""
    mini.play(random_asks([(5, 11), (5, 11)]), Limits(4, 4, 2, 64))


def test_all_finish_in_memory_for_four(mini: Mini) -> None:
    """Twelve requests of at most 30 tokens, memory for four of the longest: blocks let more than four run."""
    own, ours = mini.beside(random_asks(TWELVE), Limits(32, 4, 12, 512))
    most = max(len(step.tables) for step in own.steps)
    assert most > 4, f"at most {most} sequences ran at the same time, as many as whole slots would let"
    allowed = ours.counts["steps"] * 11 // 10
    assert own.counts["steps"] <= allowed, (
        f"{own.counts['steps']} steps, and at most {allowed} are allowed: a tenth more than the reference"
    )


def test_attention_reads_the_blocks(mini: Mini) -> None:
    """Between two steps V of one token in engine.cache becomes something else, in whichever block it is."""
    mini.play(overwritten_asks([(9, 14), (14, 14), (4, 12)], [0, 2, 3]), Limits(24, 4, 3, 64))


@settings(max_examples=12)
@given(SIZES, st.lists(st.integers(0, 9), min_size=6, max_size=6), st.integers(1, 5), st.integers(0, 12))
def test_any_requests(mini: Mini, sizes: list[tuple[int, int]], arrives: list[int], size: int, more: int) -> None:
    """Memory for the longest alone, and a little more."""
    longest = max(n + m for n, m in sizes)
    mini.play(random_asks(sizes, arrives[: len(sizes)]), Limits(-(-longest // size) + more, size, 4, 64))
