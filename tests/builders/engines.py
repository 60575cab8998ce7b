"""Runs of the real engine, with the engine's own parts and with a component in the place of one of them."""

from __future__ import annotations

import os
from typing import Any

import pytest

from folovllm import LLM, SamplingParams

WITHOUT_MINE = pytest.mark.skipif(
    bool(os.environ.get("FOLOVLLM_MINE")), reason="this is about the engine and the course, not about what you wrote"
)
STORY = "Once upon a time there was a little girl who loved her red kite."
PROMPTS = ["Lily had a red kite", STORY, "One day", f"{STORY} One day the wind", f"{STORY} One day the wind"]


def texts(max_tokens: int = 12, count: int = 5, **config: Any) -> list[list[int]]:
    """The token ids of the answers to the first `count` prompts, greedy and seeded in turn, of the embedded model."""
    params = [SamplingParams(temperature=i % 2, seed=i, max_tokens=max_tokens, ignore_eos=True) for i in range(count)]
    llm = LLM("stories-5m", use_tqdm=False, max_model_len=128, **config)
    try:
        return [list(answer.outputs[0].token_ids) for answer in llm.generate(PROMPTS[:count], params)]
    finally:
        llm.close()


def assert_same_tokens(builder: str, max_tokens: int = 12, count: int = 5, **config: Any) -> None:
    """With the component the engine says what it says without."""
    expected = texts(max_tokens, count, **config)
    got = texts(max_tokens, count, **config, builders=builder)
    for i, (theirs, ours) in enumerate(zip(expected, got, strict=True)):
        assert ours == theirs, f"answer {i} of the engine has other tokens with your component in it"
