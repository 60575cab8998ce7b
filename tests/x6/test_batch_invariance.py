"""A request has the same bits whatever else the engine does: the promise of `batch_invariant=True`."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from folovllm import LLM, SamplingParams
from folovllm.electives.rollouts.trainer import Policy
from folovllm.models.registry import PLAIN_LAYERS
from tests.helpers import tiny_checkpoint
from tests.x5.checkpoints import hybrid_checkpoint

MAX_MODEL_LEN = 96
Answer = tuple[list[int], list[float]]  # tokens and their log-probabilities


def engine(**overrides: Any) -> LLM:
    config = {"milestone": "m6", "max_model_len": MAX_MODEL_LEN, "num_kv_blocks": 60, "use_tqdm": False}
    return LLM(str(tiny_checkpoint()), batch_invariant=True, **{**config, **overrides})


def answers(llm: LLM, prompts: list[list[int]], max_tokens: int = 12) -> list[Answer]:
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=max_tokens, logprobs=0, ignore_eos=True)
    outputs = [o.outputs[0] for o in llm.generate(prompts, params, use_tqdm=False)]
    return [(list(o.token_ids), [d[t].logprob for d, t in zip(o.logprobs, o.token_ids, strict=True)]) for o in outputs]


def prompt(number: int, length: int) -> list[int]:
    return torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(number)).tolist()


@pytest.fixture(scope="module")
def alone() -> Iterator[LLM]:
    """One request at a time, whole prompts, nothing found again."""
    with engine(milestone="m3", max_num_seqs=1) as llm:
        yield llm


@settings(max_examples=12)
@given(
    lengths=st.lists(st.integers(1, 70), min_size=1, max_size=6), budget=st.sampled_from([8, 13, 64, 512]),
    blocks=st.sampled_from([8, 14, 60]), milestone=st.sampled_from(["m3", "m5", "m6"]),
)  # fmt: skip
def test_batches_chunks_and_preemption_change_no_bit(
    alone: LLM, lengths: list[int], budget: int, blocks: int, milestone: str
) -> None:
    """Few blocks preempt: decoded tokens are then computed again as a prompt, so prefill must equal decode."""
    prompts = [prompt(i, length) for i, length in enumerate(lengths)]
    expected = [answers(alone, [one])[0] for one in prompts]
    chunks = {} if milestone == "m3" else {"max_num_batched_tokens": budget}
    with engine(milestone=milestone, num_kv_blocks=blocks, max_num_seqs=6, **chunks) as llm:
        assert answers(llm, prompts) == expected, "the batch, a chunk or a preemption shows in the answer's bits"


def test_preemption_is_among_them(alone: LLM) -> None:
    prompts = [prompt(i, 40) for i in range(4)]
    expected = [answers(alone, [one], 50)[0] for one in prompts]
    with engine(num_kv_blocks=10, max_num_batched_tokens=32) as llm:
        assert answers(llm, prompts, 50) == expected
        assert llm.engine.stats().preemptions > 0, "the case is too easy"


def test_a_prefix_hit_changes_no_bit(alone: LLM) -> None:
    common = prompt(1, 48)
    prompts = [common + prompt(i, i) for i in range(2, 7)]
    expected = [answers(alone, [one])[0] for one in prompts]
    with engine(max_num_batched_tokens=64) as llm:
        answers(llm, [common])
        assert answers(llm, prompts) == expected
        assert llm.engine.prefix_cache_stats().tokens_hit >= 5 * 48


def test_in_16_bits_too() -> None:
    with engine(dtype="bfloat16") as llm:
        prompts = [prompt(i, 10 * i + 5) for i in range(4)]
        found = answers(llm, prompts)
        assert [answers(llm, [one])[0] for one in prompts] == found
        sequences = [p + tokens for p, (tokens, _) in zip(prompts, found, strict=True)]
        trainers = Policy(llm).logprobs(sequences, [len(p) for p in prompts])
        assert [row.tolist() for row in trainers] == [logprobs for _, logprobs in found]


@settings(max_examples=10)
@given(lengths=st.lists(st.tuples(st.integers(1, 60), st.integers(1, 20)), min_size=1, max_size=5))
def test_the_trainers_logprobs_are_the_engines_bits(alone: LLM, lengths: list[tuple[int, int]]) -> None:
    prompts = [prompt(i, length) for i, (length, _) in enumerate(lengths)]
    engines = [answers(alone, [one], n)[0] for one, (_, n) in zip(prompts, lengths, strict=True)]
    policy = Policy(alone)
    sequences = [p + tokens for p, (tokens, _) in zip(prompts, engines, strict=True)]
    found = policy.logprobs(sequences, [len(p) for p in prompts])
    assert [row.tolist() for row in found] == [logprobs for _, logprobs in engines]


def test_the_trainers_gradients_are_those_of_plain_layers(alone: LLM) -> None:
    check_gradients(alone, 40, 17)


def check_gradients(llm: LLM, *lengths: int) -> None:
    """Backwards it may round differently, and must compute the same."""
    sequences, gradients = [prompt(i, length) for i, length in enumerate(lengths, 1)], []
    for layers in (None, PLAIN_LAYERS):
        policy = Policy(llm, layers)
        torch.cat(policy.logprobs(sequences, [5, 1])).sum().backward()
        gradients.append({name: p.grad for name, p in policy.model.named_parameters()})
    for name, expected in gradients[1].items():
        assert expected is not None and expected.any()
        torch.testing.assert_close(gradients[0][name], expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max()))


@pytest.mark.parametrize(("overrides", "says"), [
    ({"milestone": "m1"}, "m2 or later"),
    ({"compile": True}, "leave it out"),
    ({"tensor_parallel_size": 2}, "leave tensor_parallel_size at 1"),
    ({"kv_cache_dtype": "fp8"}, "8 bits"),
    ({"speculative_method": "ngram"}, "do not work together"),
])  # fmt: skip
def test_what_breaks_the_promise_is_refused(overrides: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        engine(**overrides)


def test_layers_of_linear_attention_are_refused() -> None:
    with pytest.raises(ValueError, match="layers of linear attention are not supported: take another model"):
        LLM(str(hybrid_checkpoint()), batch_invariant=True, device="cpu", use_tqdm=False)
