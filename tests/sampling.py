"""Sampling specs, and rows of a `SamplerState` that have them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch

from folovllm.sample.sampler_state import SamplerState
from folovllm.sampling_params import SamplingParams
from folovllm.sampling_row import pack_rows
from folovllm.step.sampling_spec import SamplingSpec

CPU = torch.device("cpu")
COPIED = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logprobs",
)


def spec_of(
    params: SamplingParams,
    seed: int,
    prompt: Iterable[int] = (),
    answer: Iterable[int] = (),
    ends: Iterable[int] = (),
    bad_words: Sequence[Sequence[int]] = (),
) -> SamplingSpec:
    """The spec that the scheduler makes; `ends` are the tokens that would end the answer."""
    prompt = list(prompt)
    return SamplingSpec(
        seed=seed,
        **{name: getattr(params, name) for name in COPIED},
        first_end=len(prompt) + params.min_tokens,
        forbidden=tuple(ends) if params.min_tokens else (),
        allowed=None if params.allowed_token_ids is None else tuple(params.allowed_token_ids),
        num_prompt_tokens=len(prompt),
        bias=tuple((params.logit_bias or {}).items()),
        bad_words=tuple(map(tuple, bad_words)),
        history=np.array([*prompt, *answer] if params.has_penalties or bad_words else [], np.int32),
    )


def set_rows(state: SamplerState, specs: Mapping[int, SamplingSpec]) -> SamplerState:
    """Gives each of these rows its spec; returns the state."""
    update = pack_rows(specs)
    state.set_rows(torch.from_numpy(update.buffer).to(state.lines.device), update.num_rows, update.num_lines)
    return state


def state_of(*specs: SamplingSpec, vocab_size: int) -> SamplerState:
    """A state whose rows 0, 1, ... have these specs."""
    return set_rows(SamplerState(len(specs), vocab_size, CPU), dict(enumerate(specs)))


def adjusted(logits: torch.Tensor, state: SamplerState, positions: list[int]) -> torch.Tensor:
    """What the rows make of the logits [S, V] of the tokens at these positions."""
    return state.adjust(logits, torch.arange(len(logits), dtype=torch.int32), int32(*positions))


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)
