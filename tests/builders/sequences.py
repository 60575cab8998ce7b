"""Sequences of given tokens."""

from __future__ import annotations

from typing import Any

from folovllm.engine.detokenizer import IncrementalDetokenizer
from folovllm.request import Sequence
from folovllm.sampling_params import SamplingParams


def sequence(tokens: list[int], max_tokens: int = 12, salt: str | None = None, **params: Any) -> Sequence:
    """A waiting sequence with this prompt."""
    given = SamplingParams(max_tokens=max_tokens, **params)
    detokenizer = IncrementalDetokenizer(lambda ids: "")
    seq = Sequence("r", tokens, given, max_tokens, 0, detokenizer, cache_salt=salt)
    if given.prompt_logprobs is not None:
        seq.num_to_score = len(tokens) - 1
    return seq
