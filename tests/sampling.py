"""Sampling specs, and rows of a `SamplerState` that have them."""

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from typing import Any

import torch

from folovllm.engine.detokenizer import IncrementalDetokenizer
from folovllm.request import Request, Sequence, sampling_spec
from folovllm.sample.sampler_state import SamplerState
from folovllm.sample.sampling_row import pack_rows
from folovllm.sampling_params import SamplingParams
from folovllm.step.schedule import SamplingSpec

CPU = torch.device("cpu")


def sequence(
    params: SamplingParams, prompt: Iterable[int], answer: Iterable[int] = (), seed: int = 0,
    ends: Iterable[int] = (1,), bad_words: Iterable[SequenceOf[int]] = (),
) -> Sequence:  # fmt: skip
    """A request's sequence; `ends` are the tokens that would end its answer, `bad_words` are given as tokens."""
    answer, words = list(answer), tuple(map(tuple, bad_words))
    request = Request("r", list(prompt), params, len(answer) + 16, seed, frozenset(ends), bad_words=words)
    seq = Sequence(request, IncrementalDetokenizer(lambda ids: "".join(map(chr, ids))))
    for token in answer:
        seq.append_token(token)
    return seq


def spec_of(*args: Any, **kwargs: Any) -> SamplingSpec:
    """The spec of such a sequence, as the scheduler makes it."""
    return sampling_spec(sequence(*args, **kwargs))


def set_rows(state: SamplerState, specs: Mapping[int, SamplingSpec]) -> SamplerState:
    """Gives each of these rows its spec; returns the state."""
    update = pack_rows(specs)
    state.set_rows(torch.from_numpy(update.buffer).to(state.lines.device), update.num_rows, update.num_with_line)
    return state


def state_of(*specs: SamplingSpec, vocab_size: int) -> SamplerState:
    """A state whose rows 0, 1, ... have these specs."""
    return set_rows(SamplerState(len(specs), vocab_size, CPU), dict(enumerate(specs)))


def adjusted(logits: torch.Tensor, state: SamplerState, positions: list[int]) -> torch.Tensor:
    """What the rows make of the logits [S, V] of the tokens at these positions."""
    return state.adjust(logits, torch.arange(len(logits), dtype=torch.int32), int32(*positions))


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)
