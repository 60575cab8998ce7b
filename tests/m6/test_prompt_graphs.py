"""Captured steps with prompts say and compute what the eager ones do."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from folovllm.sampling_params import SamplingParams
from folovllm.step.forward_batch import ForwardBatch
from folovllm.step.packed import Field, PackedStep, Parts, Sample, samples_of, split
from folovllm.worker import buckets, graph_runner
from folovllm.worker.buckets import Bucket, pad, prompt_bucket, prompt_buckets
from folovllm.worker.device_tables import DeviceTables
from folovllm.worker.graph_runner import GraphRunner
from tests.helpers import prompts
from tests.m6 import test_sampling_rows
from tests.m6.test_overlap import COUNT, assert_clean, engine
from tests.workloads import ARRIVALS, serve, workload

CPU = torch.device("cpu")
ROWS, BLOCK_SIZE, MAX_BLOCKS = 6, 4, 16


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Bucket]]:
    """Capture steps with prompts on a CPU as well, of sizes that a tiny model meets; yields the buckets that were used."""
    used: list[Bucket] = []
    capture(monkeypatch, (4, 8, 24, 64, 128, 800), (0, 2, 8))
    watch(monkeypatch, used)
    yield used


def capture(monkeypatch: pytest.MonkeyPatch, tokens: tuple[int, ...], decodes: tuple[int, ...]) -> None:
    monkeypatch.setattr(buckets, "TOKENS", tokens)
    monkeypatch.setattr(buckets, "DECODES", decodes)
    monkeypatch.setattr(
        graph_runner, "buckets_for", lambda setup, _: prompt_buckets(setup.max_num_seqs, setup.max_num_batched_tokens)
    )


def watch(monkeypatch: pytest.MonkeyPatch, used: list[Bucket]) -> None:
    """Note the buckets with prompts of which a graph is replayed."""
    run = GraphRunner._graph

    def noted(self: GraphRunner, bucket: Bucket, work: Any) -> Any:
        if not bucket.is_decode:
            used.append(bucket)
        return run(self, bucket, work)

    monkeypatch.setattr(GraphRunner, "_graph", noted)


def step_of(decodes: list[int], chunks: list[tuple[int, int]]) -> PackedStep:
    """Decodes with these lengths, then chunks of (new tokens, length), in rows 0, 1, ..."""
    n = len(decodes) + len(chunks)
    fields = np.zeros((len(Field), n), np.int32)
    fields[Field.ROW] = range(n)
    fields[Field.SEQ_LEN] = [*decodes, *(length for _, length in chunks)]
    fields[Field.QUERY_LEN] = lens = [1] * len(decodes) + [new for new, _ in chunks]
    tokens = np.arange(100, 100 + sum(lens), dtype=np.int32)
    return PackedStep(fields, n, len(decodes), tokens, np.empty((3, 0), np.int32), samples_of(fields, tokens))


class TestPad:
    def test_a_worked_case(self) -> None:
        """The one of the module's docstring, but with more room for prompts."""
        bucket = prompt_bucket(num_tokens=12, num_decodes=4)
        padded = split(pad(step_of([9, 3], [(5, 5)]), bucket, padding_row=6), bucket.columns)
        rest = bucket.num_others - 1
        assert padded.fields[Field.ROW].tolist() == [0, 1, 6, 6, 2, *[6] * rest]
        assert padded.fields[Field.SEQ_LEN].tolist() == [9, 3, 0, 0, 5, *[0] * rest]
        assert padded.fields[Field.QUERY_LEN].tolist() == [1, 1, 0, 0, 5, *[0] * (rest - 1), 5]
        assert padded.samples[Sample.AFTER].tolist() == [0, 1, 6, *[0] * (bucket.num_seqs - 3)]
        assert padded.samples[Sample.ROW].tolist() == [0, 1, 2, *[6] * (bucket.num_seqs - 3)]
        assert padded.tokens.tolist() == [*range(100, 107), *[0] * 5]

    @pytest.mark.parametrize(("decodes", "chunks", "fits"), [
        (4, [8], True), (4, [9], False), (5, [1], False), (0, [12], True), (0, [13], False), (4, [1] * 8, True),
        (3, [1] * 9, False), (0, [], True),
    ])  # fmt: skip
    def test_what_fits(self, decodes: int, chunks: list[int], fits: bool) -> None:
        step = step_of([5] * decodes, [(n, n) for n in chunks])
        assert prompt_bucket(num_tokens=12, num_decodes=4).holds(step) is fits

    def test_buckets_end_with_the_budget_and_the_batch(self) -> None:
        assert [(b.num_tokens, b.num_decodes) for b in prompt_buckets(3, 100)] == [(64, 0), (64, 3), (100, 0), (100, 3)]
        assert prompt_buckets(256, 16_384)[-4:] == [prompt_bucket(3072, n) for n in (0, 16, 64, 256)]
        assert prompt_bucket(64, 256) not in prompt_buckets(256, 16_384), "each decode has a token"


@st.composite
def steps(draw: st.DrawFn) -> PackedStep:
    """Random steps of up to ROWS sequences, of which some are in blocks of their own."""
    decodes = draw(st.lists(st.integers(1, MAX_BLOCKS * BLOCK_SIZE), max_size=ROWS))
    lengths = draw(st.lists(st.integers(1, MAX_BLOCKS * BLOCK_SIZE), max_size=ROWS - len(decodes)))
    if not decodes and not lengths:
        lengths = [1]
    return step_of(decodes, [(draw(st.integers(1, length)), length) for length in lengths])


@settings(max_examples=50, deadline=None)
@given(step=steps(), more=st.integers(0, 5), decodes=st.integers(0, 3), seed=st.integers(0, 100))
def test_a_padded_step_is_the_same_step(step: PackedStep, more: int, decodes: int, seed: int) -> None:
    """Of what is there everything is the same; of the rest nothing is written, and only memory that exists is read."""
    torch.manual_seed(seed)
    bucket = prompt_bucket(max(len(step.tokens) + more, step.num_decodes + decodes), step.num_decodes + decodes)
    tables = DeviceTables(ROWS, MAX_BLOCKS, BLOCK_SIZE, CPU)
    tables.block_tables.copy_(torch.randint(50, tables.block_tables.shape))
    eager = unpacked(tables, split(torch.from_numpy(step.flatten()), step.columns), step.num_decodes)
    parts = split(torch.from_numpy(pad(step, bucket, ROWS)), bucket.columns)
    padded = unpacked(tables, parts, bucket.num_decodes)
    ids, positions, slots, starts = padded.input_ids, padded.positions, padded.slot_mapping, padded.query_start_loc
    t, n, d = len(step.tokens), step.num_seqs, step.num_decodes
    at = torch.tensor([*range(d), *range(bucket.num_decodes, bucket.num_decodes + n - d)])
    assert torch.equal(ids[:t], eager.input_ids) and torch.equal(positions[:t], eager.positions)
    assert torch.equal(slots[:t], eager.slot_mapping)
    assert torch.equal(starts[at], eager.query_start_loc[:-1])
    assert torch.equal(starts[at + 1], eager.query_start_loc[1:])
    assert torch.equal(padded.seq_lens[at], eager.seq_lens)
    assert torch.equal(padded.block_tables[at], eager.block_tables)
    assert torch.equal(padded.logits_indices[:n], eager.logits_indices)
    assert (slots[t:] == -1).all() and (positions[t:] == 0).all() and starts[-1] == bucket.num_tokens
    hole = torch.ones(bucket.num_seqs, dtype=torch.bool).index_fill(0, at, False)
    assert (padded.seq_lens[hole] == 0).all() and (parts.fields[Field.ROW, hole] == ROWS).all()


def unpacked(tables: DeviceTables, parts: Parts[torch.Tensor], num_decodes: int) -> ForwardBatch:
    """The batch of a step whose lengths nobody asks for."""
    return tables.unpack(parts, num_decodes, 0, 0, None)


@pytest.mark.parametrize("pool", [
    {}, {"block_size": 4, "num_kv_blocks": 34, "max_num_batched_tokens": 7}, {"max_num_seqs": 3, "async_scheduling": False},
    {"block_size": 16, "num_kv_blocks": 12, "max_num_batched_tokens": 130},
], ids=str)  # fmt: skip
def test_answers_are_those_of_m1(pool: dict[str, Any], captured: list[Bucket]) -> None:
    """Over chunks, preemptions, prefix hits and aborts, for every way to draw, in a cache that is poison wherever no step has written."""
    served = engine(**pool)
    served.executor._worker.runner.inner.kv_cache.fill_(torch.nan)
    for kind, arrival in (("seeded", "at_once"), ("greedy", "random_steps")):
        load = workload(kind, COUNT)
        load.check(serve(served, load.requests, arrival))
        assert_clean(served)
        assert captured
        captured.clear()
    test_sampling_rows.check(test_sampling_rows.serve_and_abort(served))
    assert_clean(served)


def test_a_graph_is_captured_once_and_every_width_serves(captured: list[Bucket]) -> None:
    """Prompts of every length up to 30 beside 0 to 9 decodes: buckets at and between their edges."""
    eager, served = engine(enforce_eager=True), engine()
    for i in range(10):
        params = SamplingParams(temperature=0.0, max_tokens=50 - i, ignore_eos=True)
        for length in range(1 + i, 31, 7):
            both = []
            for one in (eager, served):
                one.add_request(f"{i} {length}", prompts([length], seed=i)[0], params, stream=False)
                both.append([o.outputs[0].token_ids for o in one.step()])
            assert both[0] == both[1]
    while served.has_unfinished_requests():
        assert [o.outputs[0].token_ids for o in served.step()] == [o.outputs[0].token_ids for o in eager.step()]
    assert len(set(captured)) > 4
    runner = served.executor._worker.runner
    assert {bucket for bucket, _ in runner._other_graphs} == set(captured)


def test_what_is_not_captured(captured: list[Bucket], monkeypatch: pytest.MonkeyPatch) -> None:
    """Scored prompts need all hidden states; an engine that captures nothing has no buckets; a CPU computes no padding."""
    served = engine()
    served.add_request("a", [1, 2, 3, 4], SamplingParams(max_tokens=1, prompt_logprobs=1), stream=False)
    while served.has_unfinished_requests():
        served.step()
    assert not captured
    assert not any(engine(enforce_eager=True).executor._worker.runner._others.values())
    monkeypatch.undo()
    assert not any(engine().executor._worker.runner._others.values())


@pytest.mark.gpu
@pytest.mark.parametrize("arrival", ARRIVALS)
@pytest.mark.parametrize("pool", [{}, {"block_size": 4, "num_kv_blocks": 64, "max_num_batched_tokens": 70}], ids=str)
def test_on_a_gpu(pool: dict[str, Any], arrival: str) -> None:
    load, used = workload("seeded"), list[Bucket]()
    served = engine(device="cuda", dtype="float32", attention_backend="triton", **pool)
    served.executor._worker.runner.inner.kv_cache.fill_(torch.nan)
    with pytest.MonkeyPatch.context() as patch:
        watch(patch, used)
        load.check(serve(served, load.requests, arrival), tol=0.05)
    assert used
    assert_clean(served)
