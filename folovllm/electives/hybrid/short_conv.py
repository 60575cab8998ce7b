"""The short convolution: before linear attention each channel mixes the last K tokens, K being 4 or so.

A state stores no positions, and a key does not say which token stood next to it. The convolution mixes neighbours into each token.
Its own state is small: the last K - 1 inputs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def convolve(x: torch.Tensor, state: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Convolve the next tokens of a sequence, each channel by itself, and apply SiLU: y_t = silu(sum over j of w_j x_(t-K+1+j)).

    The last weight is for the token itself. The K - 1 inputs before the first token are in `state`, oldest first. So a
    prompt may be split anywhere, also into pieces shorter than K - 1, which leave part of the old state in the new one.

    Args:
        x: [..., n, C], the inputs of n new tokens; dimensions before them are independent sequences.
        state: [..., K - 1, C], zeros at the start of a sequence.
        weight: [C, K].

    Returns:
        [..., n, C] in float32, and the state after the last token, in the dtype of `state`.
    """
    inputs = torch.cat((state, x.to(state.dtype)), dim=-2)  # [..., K - 1 + n, C]
    windows = inputs.unfold(-2, weight.shape[1], 1)  # [..., n, C, K]
    mixed = (windows.float() * weight.float()).sum(-1)
    return F.silu(mixed), inputs[..., x.shape[-2] :, :]
