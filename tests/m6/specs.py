"""How a sequence is drawn, from its parameters and its tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from folovllm.sampling_params import SamplingParams
from folovllm.step.sampling_spec import SamplingSpec


def spec_of(
    params: SamplingParams,
    seed: int,
    prompt: Iterable[int] = (),
    answer: Iterable[int] = (),
    ends: Iterable[int] = (),
    bad_words: Sequence[Sequence[int]] = (),
) -> SamplingSpec:
    """As the scheduler makes it; `ends` are the tokens that would end the answer."""
    prompt = list(prompt)
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
    return SamplingSpec(
        seed=seed,
        **{name: getattr(params, name) for name in (*names, "logprobs")},
        first_end=len(prompt) + params.min_tokens,
        forbidden=tuple(ends) if params.min_tokens else (),
        allowed=None if params.allowed_token_ids is None else tuple(params.allowed_token_ids),
        num_prompt_tokens=len(prompt),
        bias=tuple((params.logit_bias or {}).items()),
        bad_words=tuple(map(tuple, bad_words)),
        history=np.array([*prompt, *answer] if params.has_penalties or bad_words else [], np.int32),
    )
