"""What the rows of a `SamplerState` make of logits, for tests that check it beside other implementations."""

from __future__ import annotations

import torch

from folovllm.sample.sampler_state import SamplerState, adjust
from folovllm.sampling_row import pack_updates, row_update
from folovllm.step.sampling_spec import SamplingSpec

CPU = torch.device("cpu")


def state_of(*specs: SamplingSpec, vocab_size: int) -> SamplerState:
    """What is known of rows 0, 1, ..., which have these specs."""
    state = SamplerState(len(specs), vocab_size, CPU)
    update = pack_updates([row_update(row, spec) for row, spec in enumerate(specs)])
    state.set_rows(torch.from_numpy(update.buffer), update.num_rows, update.num_with_line)
    return state


def adjusted(logits: torch.Tensor, state: SamplerState, positions: list[int]) -> torch.Tensor:
    """What the rows make of the logits [S, V] of the tokens at these positions."""
    rows = torch.arange(len(logits), dtype=torch.int32)
    return adjust(logits, state.fields[: len(logits)], state.words, rows, torch.tensor(positions, dtype=torch.int32))


def note(state: SamplerState, row: int, token: int, position: int) -> None:
    """A row has drawn a token."""
    at, where = (torch.tensor([number], dtype=torch.int32) for number in (row, position))
    state.note(torch.tensor([token]), at, where)
