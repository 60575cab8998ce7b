"""With the cache and with chunks, every answer is what it was without."""

import random
from typing import Any

import pytest

from folovllm.attention.backends.abstract import BackendUnavailable
from folovllm.config import EngineConfig
from folovllm.engine.llm_engine import LLMEngine
from folovllm.engine.scheduler import preempt
from folovllm.sampling_params import SamplingParams
from tests.helpers import prompts, tiny_checkpoint
from tests.workloads import assert_nothing_left, check_runs, finish, make_engine, serve, workload

BLOCK = 4
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


def engine(**overrides: Any) -> LLMEngine:
    fields = {"milestone": "m5", "block_size": BLOCK, "max_num_seqs": 16, "num_kv_blocks": 600}
    return make_engine(tiny_checkpoint(), **(fields | overrides))


@pytest.fixture(scope="module")
def plain() -> LLMEngine:
    """An engine without the cache and without chunks."""
    return engine(enable_prefix_caching=False, enable_chunked_prefill=False)


@pytest.fixture(scope="module")
def reusing() -> LLMEngine:
    return engine()


@pytest.fixture
def served(reusing: LLMEngine) -> LLMEngine:
    """An engine whose cache is empty, and whose counts begin anew."""
    reusing.abort_request(reusing.request_ids)
    reusing.reset_prefix_cache()
    return reusing


def answers(served: LLMEngine, turns: list[list[list[int]]], params: SamplingParams = GREEDY) -> list[list[list[int]]]:
    """Token ids of all answers; each batch is submitted at once, after the one before has finished."""
    result = []
    for number, batch in enumerate(turns):
        for i, prompt in enumerate(batch):
            served.add_request(f"{number}-{i}", prompt, params)
        done = finish(served)
        result.append([[*o.token_ids] for i in range(len(batch)) for o in done[f"{number}-{i}"].outputs])
    assert_nothing_left(served)
    return result


def test_a_shared_block_counts_once(served: LLMEngine) -> None:
    (prefix,) = prompts([5 * BLOCK])
    for name, own in zip("abc", prompts([2, 3, 4]), strict=True):
        served.add_request(name, prefix + own, GREEDY)
        served.step()
        stats = served.stats()
        assert 0 <= stats.kv_waste < 1 and stats.kv_tokens_stored <= stats.kv_blocks_used * BLOCK
    assert [seq.num_computed_tokens for seq in served.scheduler.running] == [24, 24, 24]
    assert stats.kv_tokens_stored == 5 * BLOCK + 3 * 4
    for name in "abc":
        served.abort_request(name)
    assert_nothing_left(served)


def test_answers_are_those_of_m1(served: LLMEngine) -> None:
    check_runs(served)


@pytest.mark.parametrize(("arrival", "caching", "budget"), [
    ("at_once", False, 1),  # the least
    ("random_steps", True, 3),  # less than a block
    ("random_steps", False, 16),  # whole blocks
    ("at_once", True, 33),  # a token more
    ("at_once", False, 64),  # most prompts at once
])  # fmt: skip
def test_chunks_of_every_size(arrival: str, caching: bool, budget: int) -> None:
    load = workload("seeded", 16)
    served = engine(max_num_batched_tokens=budget, enable_prefix_caching=caching)
    served.history = []
    load.check(serve(served, load.requests, arrival))
    assert max(step.num_tokens for step in served.history) <= budget


class TestPrefixes:
    """What is shared, at and around the boundaries of blocks."""

    @pytest.mark.parametrize("shared", [1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK - 1, 3 * BLOCK, 3 * BLOCK + 1, 30])
    def test_a_prefix_that_ends_anywhere(self, served: LLMEngine, plain: LLMEngine, shared: int) -> None:
        """And a prompt that is cached to its end, of which one token at least is computed again."""
        head, *tails = prompts([shared, 9, 1, 14], seed=shared)
        batches = [[head + tail] for tail in tails] + [[head]]
        assert answers(served, batches) == answers(plain, batches)
        assert served.prefix_cache_stats().tokens_hit >= 2 * (shared // BLOCK) * BLOCK
        served.add_request("again", head, GREEDY)
        assert finish(served)["again"].num_cached_tokens == (shared - 1) // BLOCK * BLOCK

    def test_salts_are_not_shared_and_do_not_change_the_answer(self, served: LLMEngine) -> None:
        prompt = prompts([17], seed=4)[0]
        cached, replies = [], []
        for i, salt in enumerate(["a", "b", None, "a"]):
            served.add_request(f"s{i}", prompt, GREEDY, cache_salt=salt)
            output = finish(served)[f"s{i}"]
            cached.append(output.num_cached_tokens)
            replies.append(output.outputs[0].token_ids)
        assert cached == [0, 0, 0, 16] and len({tuple(r) for r in replies}) == 1

    def test_without_a_cache_there_is_nothing_to_reset(self, plain: LLMEngine) -> None:
        with pytest.raises(ValueError, match="enable_prefix_caching"):
            plain.reset_prefix_cache()

    def test_aborted_requests_leave_usable_blocks(self, served: LLMEngine, plain: LLMEngine) -> None:
        prompt = prompts([3 * BLOCK + 1], seed=6)[0]
        served.add_request("a", prompt, GREEDY)
        served.step()
        served.abort_request("a")
        assert answers(served, [[prompt]]) == answers(plain, [[prompt]])
        assert served.prefix_cache_stats().tokens_hit == 3 * BLOCK


@pytest.mark.parametrize(("num_kv_blocks", "budget"), [(34, 9), (40, 40), (60, 9)])
def test_pools_so_small_that_they_evict_and_preempt(plain: LLMEngine, num_kv_blocks: int, budget: int) -> None:
    rng = random.Random(num_kv_blocks)
    heads = prompts([20, 33], seed=7)
    tails = prompts([rng.randint(1, 20) for _ in range(16)], seed=8)
    batches = [[heads[rng.randrange(2)][: rng.choice([20, 12, 7])] + tail for tail in tails[i : i + 8]] for i in (0, 8)]
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    served = engine(num_kv_blocks=num_kv_blocks, max_num_batched_tokens=budget)
    assert answers(served, batches, params) == answers(plain, batches, params)
    assert served.prefix_cache_stats().evictions > 0 and served.stats().preemptions > 0


def test_prompts_longer_than_the_budget_are_served_only_in_chunks() -> None:
    with pytest.raises(ValueError, match="enable_chunked_prefill"):
        make_engine(tiny_checkpoint(), milestone="m3", max_num_batched_tokens=16)
    served = engine(max_num_batched_tokens=16)
    served.add_request("a", prompts([100])[0], GREEDY)
    assert len(finish(served)["a"].outputs[0].token_ids) == 6


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["torch_paged", "triton", "flash_attn"])
def test_on_a_gpu(backend: str) -> None:
    """The same prompts with and without cache and chunks: tokens agree until rounding decides."""
    head, *tails = prompts([300, 9, 1, 14, 60], seed=3)
    batches = [[head + tail for tail in tails]] * 2
    model = tiny_checkpoint(head_dim=64, max_position_embeddings=1024)
    fields: dict[str, Any] = {"model": str(model), "device": "cuda", "dtype": "bfloat16", "use_tqdm": False}
    fields |= {"attention_backend": backend, "max_model_len": 512}
    try:
        cached = LLMEngine(EngineConfig(milestone="m5", max_num_batched_tokens=64, **fields))
    except BackendUnavailable as error:
        pytest.skip(str(error))
    plain = LLMEngine(EngineConfig(milestone="m4", **fields))
    first, second = answers(cached, batches), answers(plain, batches)
    pairs = [(a[0], b[0]) for one, other in zip(first, second, strict=True) for a, b in zip(one, other, strict=True)]
    assert sum(a == b for a, b in pairs) >= 0.75 * len(pairs)
    assert cached.prefix_cache_stats().tokens_hit >= 256 * len(tails)


def test_what_one_computed_oneself_was_not_cached() -> None:
    """Preempted between two chunks of its prompt, a sequence finds its own blocks again."""
    served = engine(long_prefill_token_threshold=2 * BLOCK)
    served.add_request("a", prompts([5 * BLOCK])[0], GREEDY)
    served.step()
    (seq,) = served.scheduler.running
    preempt(served.scheduler, [seq])
    served.step()
    assert served.prefix_cache_stats().tokens_hit == 2 * BLOCK  # it did find them
    assert finish(served)["a"].num_cached_tokens == 0
