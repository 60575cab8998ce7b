"""A decode loop: each token is computed once, at its place, and the caches are those of one answer."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from folovllm import LLM, SamplingParams
from tests.builders.engines import assert_same_tokens

V = 50


class ToyModel:
    """Two layers whose K and V are the token and its position; the next token depends on all of them, and on their order."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self.dtype = dtype
        self.calls: list[tuple[list[int], int]] = []

    def __call__(self, token_ids: list[int], start: int, caches: list[Any]) -> torch.Tensor:
        self.calls.append((list(token_ids), start))
        assert len(caches) == 2, "each of the two layers has a cache"
        positions = range(start, start + len(token_ids))
        score = 0
        for layer, cache in enumerate(caches):
            rows = [[token, position] for token, position in zip(token_ids, positions, strict=True)]
            key = torch.tensor(rows, dtype=self.dtype)[:, None].repeat(1, 3, 1)  # [T, Hkv = 3, D = 2]
            cache.append(key, -key - layer)
            assert len(cache) == len(cache.key) == len(cache.value), "len(cache) is the number of cached tokens"
            assert cache.key.shape[1:] == (3, 2) and cache.key.dtype == self.dtype, "K keeps its shape and dtype"
            assert (cache.value == -cache.key - layer).all(), "V lies beside its K, in the cache of its own layer"
            score += sum(int(t + 1) * int(p + 1) for t, p in cache.key[:, 0].tolist())
        return torch.nn.functional.one_hot(torch.tensor(score % V), V).float()


def greedy(logits: torch.Tensor) -> int:
    assert logits.shape == (V,), "sample takes the logits [V] that forward returned"
    return int(logits.argmax())


def expected(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(sum((t + 1) * (p + 1) for p, t in enumerate(tokens)) * 2 % V)
    return tokens[len(prompt) :]


def run(component: Any, prompt: list[int], count: int, model: ToyModel | None = None) -> list[int]:
    loop = component(model or ToyModel(), 2, 128)
    return list(itertools.islice(loop.answer(prompt, greedy), count))


def test_a_worked_case(component: Any) -> None:
    """Prompt 3, 1: the layers sum (3 + 1) * 1 + (1 + 1) * 2 = 8 each, so 16; then 16 + 17 * 3 * 2 = 118, of 50: 18."""
    assert run(component, [3, 1], 2) == [16, 18], "forward got the tokens 3, 1 at 0, 1, then 16 at position 2?"


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 40])
def test_the_whole_answer(component: Any, length: int) -> None:
    prompt = [(7 * i + 3) % V for i in range(length)]
    assert run(component, prompt, 60) == expected(prompt, 60), "a token sees all before it, each at its own position"


def test_each_token_is_computed_once(component: Any) -> None:
    model = ToyModel()
    tokens = run(component, [5, 6, 7], 6, model)
    computed = [(token, start + i) for tokens_, start in model.calls for i, token in enumerate(tokens_)]
    known = list(enumerate([5, 6, 7, *tokens]))
    assert computed == [(token, place) for place, token in known][: len(computed)], "tokens go in once, in their order"
    assert len(computed) <= len(known), "the cache has all that was computed: nothing goes in twice"


def test_nothing_is_computed_before_it_is_asked_for(component: Any) -> None:
    model = ToyModel()
    run(component, [5, 6], 1, model)
    assert model.calls == [([5, 6], 0)], "the first token needs the prompt and nothing else, in one call"


def test_answers_do_not_mix(component: Any) -> None:
    """Of one loop: one after the other, and in turns."""
    loop = component(ToyModel(), 2, 128)
    prompts = [[1, 2, 3], [4], [1, 2, 3]]
    for prompt in prompts:
        got = list(itertools.islice(loop.answer(prompt, greedy), 5))
        assert got == expected(prompt, 5), "an answer begins with empty caches"
    answers = [loop.answer(prompt, greedy) for prompt in prompts]
    turns = [[next(answer) for answer in answers] for _ in range(5)]
    for prompt, got in zip(prompts, map(list, zip(*turns, strict=True)), strict=True):
        assert got == expected(prompt, 5), "each answer has caches of its own"


def test_each_token_is_sampled_once(component: Any) -> None:
    sampled: list[int] = []

    def sample(logits: torch.Tensor) -> int:
        sampled.append(len(sampled) + 10)
        return sampled[-1]

    got = list(itertools.islice(component(ToyModel(), 2, 128).answer([1], sample), 4))
    assert got == sampled == [10, 11, 12, 13], "what is sampled is yielded, once each: sampling may be random"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision(component: Any, dtype: torch.dtype) -> None:
    assert run(component, [3, 1], 1, ToyModel(dtype)) == [16], "the cache keeps the dtype that it is given"


def test_an_answer_as_long_as_the_context(component: Any) -> None:
    assert run(component, [1, 2, 3], 125) == expected([1, 2, 3], 125), "128 tokens, the whole of max_model_len"


def test_in_the_engine(component: Any) -> None:
    assert_same_tokens("decode_loop", milestone="m1", model_impl="native")


def test_scores_of_a_prompt_in_the_engine(component: Any) -> None:
    def scores(**config: Any) -> list[float]:
        llm = LLM("stories-5m", milestone="m1", model_impl="native", use_tqdm=False, **config)
        params = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=0)
        (answer,) = llm.generate(["Lily had a red kite"], params)
        llm.close()
        assert answer.prompt_logprobs is not None
        return [value.logprob for row in answer.prompt_logprobs[1:] for value in row.values()]

    assert scores(builders="decode_loop") == pytest.approx(scores(), abs=1e-4), "the prompt's scores are the engine's"
