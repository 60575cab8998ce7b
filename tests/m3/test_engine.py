"""Blocks of any size and pools of any size give M1's answers; with one block a sequence, M2's waste as well."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch

from folovllm.engine.llm_engine import LLMEngine
from folovllm.engine.metrics import EngineStats
from folovllm.sampling_params import SamplingParams
from tests.helpers import assert_tokens_equal, hf_greedy, prompts, tiny_checkpoint, tolerance
from tests.workloads import (
    AT_ONCE,
    MAX_MODEL_LEN,
    RANDOM_STEPS,
    RUNS,
    Request,
    assert_nothing_left,
    check_runs,
    make_engine,
    mixed_requests,
    run_to_end,
    serve,
    workload,
)

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


@pytest.fixture(scope="module")
def growing() -> list[tuple[list[int], list[int], torch.Tensor]]:
    """Ten short prompts with long answers, and the logits of these."""
    return [(ids, *hf_greedy(tiny_checkpoint(), ids, 40)) for ids in prompts([3, 1, 6, 2, 5, 4, 3, 6, 1, 2])]


@pytest.mark.parametrize("block_size", [1, 5])
def test_preemption_is_the_rule(block_size: int, growing: list[tuple[list[int], list[int], torch.Tensor]]) -> None:
    """Many are admitted, few can stay."""
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    engine = make_engine(
        tiny_checkpoint(), milestone="m3", block_size=block_size, max_model_len=50, num_kv_blocks=-(-50 // block_size)
    )
    outputs = serve(engine, [Request(prompt, params) for prompt, *_ in growing])
    assert engine.stats().preemptions >= 2 * len(growing)  # each gave way twice, on average
    for (_, *expected), output in zip(growing, outputs, strict=True):
        assert_tokens_equal(output.outputs[0].token_ids, *expected)


def test_priorities_change_the_order_and_no_answer() -> None:
    expected = workload("seeded", 16)
    pool = {"block_size": 2, "max_model_len": LONGEST, "num_kv_blocks": LONGEST // 2}
    engine = make_engine(expected.model, milestone="m3", scheduling="priority", **pool)
    expected.check(serve(engine, expected.requests))
    assert engine.stats().preemptions >= 1


def watched(engine: LLMEngine, requests: list[Request]) -> list[EngineStats]:
    """The statistics after each step, with all requests there from the start."""
    for i, request in enumerate(requests):
        engine.add_request(f"r{i}", request.prompt, request.params)
    seen = []
    while engine.has_unfinished_requests():
        engine.step()
        seen.append(engine.stats())
    return seen


def test_a_block_as_long_as_the_context_wastes_what_m2_wastes() -> None:
    requests = mixed_requests(count=16)
    m2 = make_engine(tiny_checkpoint(), milestone="m2", max_num_seqs=8)
    m3 = make_engine(tiny_checkpoint(), milestone="m3", max_num_seqs=8, block_size=MAX_MODEL_LEN)
    slots, blocks = watched(m2, requests), watched(m3, requests)
    assert blocks == slots  # bytes reserved, bytes used, queues, step by step
    assert max(stats.kv_waste for stats in blocks) > 0.5


def test_small_blocks_waste_less_than_a_block_a_sequence() -> None:
    engine = make_engine(tiny_checkpoint(), milestone="m3", max_num_seqs=8, block_size=4)
    per_token = engine.setup.kv_bytes_per_token
    for stats in watched(engine, mixed_requests(count=16)):
        wasted_tokens = (stats.kv_bytes_reserved - stats.kv_bytes_used) // per_token
        assert 0 <= wasted_tokens <= 3 * stats.running


@pytest.fixture(scope="module")
def long_answers() -> dict[int, tuple[list[int], torch.Tensor]]:
    """Greedy answers of 18 tokens, and their logits, by the length of the prompt."""
    return {length: hf_greedy(tiny_checkpoint(), prompts([length])[0], 18) for length in (15, 16, 17)}


@pytest.mark.parametrize("prompt", [15, 16, 17])
def test_around_a_block_boundary(prompt: int, long_answers: dict[int, tuple[list[int], torch.Tensor]]) -> None:
    """Prompts of a block less one, one and one more; answers that end on a block's last slot and beside it."""
    (ids,), (tokens, logits) = prompts([prompt]), long_answers[prompt]
    engine = make_engine(tiny_checkpoint(), milestone="m3", block_size=16, max_num_seqs=2)
    for answer in (1, 2, 15, 16, 17, 18):
        engine.add_request("r", ids, SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True))
        blocks, output = [], None
        while engine.has_unfinished_requests():
            blocks.append(engine.stats().kv_blocks_used)
            (output,) = engine.step()
        assert output is not None
        # The last token drawn is never computed, so it takes no place.
        assert blocks == [0, *(-(-n // 16) for n in range(prompt, prompt + answer - 1))]
        assert_tokens_equal(output.outputs[0].token_ids, tokens[:answer], logits[:answer], tolerance(logits))
        assert_nothing_left(engine)


def test_a_pool_of_exactly_one_sequence() -> None:
    """One request fills the last slot of the last block; a second waits for it."""
    first, second = prompts([40, 30])
    engine = make_engine(tiny_checkpoint(), milestone="m3", block_size=16, max_model_len=64, num_kv_blocks=4)
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    outputs = serve(engine, [Request(first, params), Request(second, params)])
    for ids, output in zip((first, second), outputs, strict=True):
        assert len(ids) + len(output.outputs[0].token_ids) == 64
        assert_tokens_equal(output.outputs[0].token_ids, *hf_greedy(tiny_checkpoint(), ids, 64 - len(ids)))


def test_preemption_watched() -> None:
    """Two sequences grow until no block is free: the later one gives way, waits for the first to end, and resumes."""
    engine = make_engine(tiny_checkpoint(), milestone="m3", block_size=4, max_model_len=40, num_kv_blocks=10)
    engine.history = []
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=1)
    for name, ids in zip("ab", prompts([12, 12]), strict=True):
        engine.add_request(name, ids, params, stream=False)
    finished = run_to_end(engine)
    scheduled_seqs = [{name: (start, n) for name, _, start, n in step.scheduled_seqs} for step in engine.history]
    preempted = next(i for i, step in enumerate(engine.history) if step.preempted)
    assert scheduled_seqs[0] == {"a": (0, 12), "b": (0, 12)}
    assert engine.history[preempted - 1].kv_blocks_used == 10
    assert scheduled_seqs[preempted] == {"a": (20, 1)}  # five blocks each: a gets a sixth, b gives all back
    resumed = next(i for i in range(preempted, len(scheduled_seqs)) if "b" in scheduled_seqs[i])
    assert scheduled_seqs[resumed] == {"b": (0, 21)}  # its prompt and the nine tokens of its answer so far, in one step
    assert all("b" not in step for step in scheduled_seqs[preempted:resumed])
    assert [output.request_id for output in finished] == ["a", "b"]
    for output, ids in zip(finished, prompts([12, 12]), strict=True):
        answer = output.outputs[0]
        assert_tokens_equal(answer.token_ids, *hf_greedy(tiny_checkpoint(), ids, 20))
        assert [next(iter(row)) for row in answer.logprobs] == answer.token_ids  # none lost, none doubled


def test_a_preempted_request_can_be_aborted() -> None:
    engine = make_engine(tiny_checkpoint(), milestone="m3", block_size=4, max_model_len=40, num_kv_blocks=10)
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    for name, ids in zip("ab", prompts([12, 12]), strict=True):
        engine.add_request(name, ids, params, stream=False)
    while not engine.stats().preemptions:
        engine.step()
    output = engine.abort_request("b")
    assert output.outputs[0].finish_reason == "abort" and len(output.outputs[0].token_ids) == 9
    run_to_end(engine)
    assert_nothing_left(engine)


def test_other_families_and_backends() -> None:
    for family in ("llama", "qwen2", "mistral"):
        expected = workload("greedy", count=4, family=family)
        for backend in ("torch_paged", "torch_naive"):
            engine = make_engine(
                expected.model, milestone="m3", block_size=4, max_num_seqs=4, attention_backend=backend
            )
            expected.check(serve(engine, expected.requests))


def test_a_finished_step_frees_before_the_next() -> None:
    """The blocks of a request that ends are there for the very next step."""
    engine = make_engine(tiny_checkpoint(), milestone="m3", block_size=4, max_model_len=16, num_kv_blocks=4)
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    for name in "abc":
        engine.add_request(name, [1] * 12, params)
    engine.history = []
    run_to_end(engine)
    assert all(step.running == 1 for step in engine.history)
    assert [before.index + 1 for before, _ in pairwise(engine.history)] == list(range(1, 12))  # no idle step
