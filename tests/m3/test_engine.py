"""Blocks of any size and pools of any size give M1's answers; with one block a sequence, M2's waste as well."""

from collections.abc import Sequence

import pytest

from tests.helpers import tiny_checkpoint
from tests.workloads import AT_ONCE, RANDOM_STEPS, RUNS, check_runs, make_engine, serve, workload

LONGEST = 84  # tokens of the longest request of the workloads: 60 of prompt, 24 of answer


@pytest.mark.parametrize(
    ("block_size", "runs"), [(1, [AT_ONCE]), (2, [RANDOM_STEPS]), (16, RUNS), (256, [RANDOM_STEPS])], ids=str
)
def test_output_equals_m1_whatever_the_blocks(block_size: int, runs: Sequence[tuple[str, str]]) -> None:
    """The largest is larger than the context."""
    engine = make_engine(tiny_checkpoint(), milestone="m3", block_size=block_size, max_num_seqs=16)
    check_runs(engine, *runs)
    assert engine.stats().preemptions == 0


@pytest.mark.parametrize(
    ("block_size", "runs"), [(1, [AT_ONCE]), (2, [AT_ONCE]), (16, [AT_ONCE, RANDOM_STEPS])], ids=str
)
def test_output_equals_m1_with_hardly_any_blocks(block_size: int, runs: Sequence[tuple[str, str]]) -> None:
    pool = {"block_size": block_size, "max_model_len": LONGEST, "num_kv_blocks": -(-LONGEST // block_size)}
    engine = make_engine(tiny_checkpoint(), milestone="m3", **pool)
    check_runs(engine, *runs)
    assert engine.stats().preemptions >= len(runs)


def test_priorities_change_the_order_and_no_answer() -> None:
    expected = workload("seeded", 16)
    pool = {"block_size": 2, "max_model_len": LONGEST, "num_kv_blocks": LONGEST // 2}
    engine = make_engine(expected.model, milestone="m3", scheduling="priority", **pool)
    expected.check(serve(engine, expected.requests))
    assert engine.stats().preemptions >= 1


def test_other_families_and_backends() -> None:
    for family in ("llama", "qwen2", "mistral"):
        expected = workload("greedy", count=4, family=family)
        for backend in ("torch_paged", "torch_naive"):
            fields = {"block_size": 4, "max_num_seqs": 4, "attention_backend": backend}
            engine = make_engine(expected.model, milestone="m3", **fields)
            expected.check(serve(engine, expected.requests))
