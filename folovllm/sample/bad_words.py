"""Bad words of a row in torch: after each sample it sets the tokens that would complete one (`folovllm/sampling_row.py`)."""

from __future__ import annotations

import torch

from folovllm.sampling_row import (
    BAD_ENDS_AT,
    BAD_TOKENS_AT,
    BITS_OF,
    MASK_AT,
    MAX_BAD_WORDS,
    PLANES,
    RECENT,
    RECENT_AT,
)


def forbid_next(line: torch.Tensor, token: torch.Tensor, position: int) -> None:
    """Record a sampled `token` [] at `position`, and set the bits of exactly the tokens that must not come next.

    `line`: the part of a row's line behind its words. It is changed in place.
    """
    line[RECENT_AT + position % RECENT] = token + 1
    ends = line[BAD_ENDS_AT : BAD_ENDS_AT + MAX_BAD_WORDS]
    ends = ends[ends > 0].long()
    lengths = ends.diff(prepend=ends.new_zeros(1))
    last = line[BAD_TOKENS_AT + ends - 1]
    matches = torch.ones_like(ends, dtype=torch.bool)
    for back in range(1, int(lengths.max())):  # distance from the next token
        wanted = line[BAD_TOKENS_AT + (ends - 1 - back).clamp(min=0)]
        matches &= (lengths <= back) | (line[RECENT_AT + (position + 1 - back) % RECENT] == wanted + 1)
    planes = MASK_AT + PLANES * (last // BITS_OF) + 1
    line[planes] = 0
    for plane, bit in zip(planes[matches].tolist(), (last[matches] % BITS_OF).tolist(), strict=True):
        line[plane] |= (1 << bit) - (1 << 32) * (bit == BITS_OF - 1)  # bit 31 is the sign
