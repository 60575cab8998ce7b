"""Whoever shares a batch with a request, it gets the answer that M1 gives it alone."""

from collections.abc import Sequence

import pytest

from tests.helpers import tiny_checkpoint
from tests.workloads import AT_ONCE, RANDOM_STEPS, RUNS, check_runs, make_engine, mixed_requests, serve, workload


@pytest.mark.parametrize(
    ("max_num_seqs", "runs"), [(1, [RANDOM_STEPS]), (2, [RANDOM_STEPS]), (8, RUNS), (64, [AT_ONCE])], ids=str
)
def test_output_equals_m1(max_num_seqs: int, runs: Sequence[tuple[str, str]]) -> None:
    check_runs(make_engine(tiny_checkpoint(), max_num_seqs=max_num_seqs), *runs)


def test_the_batch_is_filled_and_never_overfilled() -> None:
    engine = make_engine(tiny_checkpoint(), max_num_seqs=8)
    engine.history = []
    serve(engine, mixed_requests())
    running = [step.running for step in engine.history]
    assert max(running) == 8 and running[0] == 8
    assert len(running) < 24 + 32 * 24 // 8  # far fewer steps than tokens
    assert all(step.running == 8 for step in engine.history if step.waiting)  # a free place is taken at once


def test_other_families() -> None:
    for family in ("llama", "qwen2", "mistral"):
        expected = workload("greedy", count=4, family=family)
        expected.check(serve(make_engine(expected.model, max_num_seqs=4), expected.requests))
