"""Stage 6: the device never waits for the host."""

from hypothesis import given, settings
from hypothesis import strategies as st

from milestones.mini.given.contract import Limits
from tests.mini.conftest import STORIES, Mini, interfered, overwritten_asks, random_asks, running_example

SIZES = st.lists(st.tuples(st.integers(1, 20), st.integers(1, 12)), min_size=1, max_size=6)


def test_worked_case(mini: Mini) -> None:
    """An answer of 3 tokens: three steps are launched by calls 0 to 2, and read by calls 1 to 3. Only the last read leaves nothing."""
    trace = mini.play(random_asks([(5, 3)]), Limits(8, 4, 4, 64))
    said = [("work" if step.work else "", "token" if step.tokens else "") for step in trace.steps]
    assert said == [("work", ""), ("work", "token"), ("work", "token"), ("", "token")], f"what the calls did: {said}"
    assert trace.idle == 1, f"{trace.idle} reads left the device with nothing to do"


def test_the_device_is_never_idle(mini: Mini) -> None:
    """Answers of all lengths, and chunks: as long as anything is left to compute, a step is launched behind the one that is read."""
    trace = mini.play(random_asks([(5, 12), (30, 3), (7, 9), (4, 1), (9, 6)]), Limits(40, 4, 3, 16))
    assert trace.idle == 1, f"{trace.idle} reads left the device with nothing to do; only the last may"


def test_the_device_reads_the_cache(mini: Mini) -> None:
    """The harness changes V of one token behind what was launched: the step that is launched next reads that."""
    limits = Limits(16, 4, 2, 64)
    mini.play(overwritten_asks([(9, 12), (5, 12)], seed=1), limits)
    asks = random_asks([(9, 12), (5, 12)])
    mini.play([interfered(ask, shifted=True) for ask in asks], limits, shifts=True)


def test_no_step_too_many(mini: Mini) -> None:
    own, ours = mini.beside(random_asks([(5, 20), (9, 4), (3, 7), (12, 15), (6, 2), (8, 11)]), Limits(24, 4, 3, 32))
    assert own.counts["steps"] <= ours.counts["steps"], (
        f"{own.counts['steps']} steps, and the reference launches {ours.counts['steps']}"
    )


def test_somebody_gives_way_while_its_token_is_in_flight(mini: Mini) -> None:
    trace = mini.play(random_asks([(8, 16), (8, 16), (8, 16)]), Limits(12, 4, 3, 64))
    assert any(step.preempted for step in trace.steps), "nobody was preempted"


def test_the_running_example(mini: Mini) -> None:
    mini.play(running_example(late=2), Limits(10, 4, 3, 16), folder=STORIES)


@settings(max_examples=12)
@given(
    SIZES,
    st.lists(st.integers(0, 9), min_size=6, max_size=6),
    st.integers(1, 5),
    st.integers(0, 12),
    st.integers(4, 40),
)
def test_any_requests(
    mini: Mini, sizes: list[tuple[int, int]], arrives: list[int], size: int, more: int, budget: int
) -> None:
    longest = max(n + m for n, m in sizes)
    mini.play(random_asks(sizes, arrives[: len(sizes)]), Limits(-(-longest // size) + more, size, 4, budget))
