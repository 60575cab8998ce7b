"""Sequences of given tokens."""

from __future__ import annotations

from typing import Any

from folovllm.engine.detokenizer import IncrementalDetokenizer
from folovllm.request import Request, Sequence
from folovllm.sampling_params import SamplingParams


def sequence(tokens: list[int], max_tokens: int = 12, salt: str | None = None, **params: Any) -> Sequence:
    """A waiting sequence with this prompt."""
    given = SamplingParams(max_tokens=max_tokens, **params)
    detokenizer = IncrementalDetokenizer(lambda ids: "")
    return Sequence(Request("r", tokens, given, max_tokens, 0, cache_salt=salt), detokenizer)
