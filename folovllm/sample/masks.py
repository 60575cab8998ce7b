"""Which tokens a row may draw at all: one bit for each, in int32 words (`folovllm/draw_row.py`)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from folovllm.draw_row import BITS_OF


def allowed_by(masks: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Masks [n, ceil(V / 32)] int32 as [n, V] bool."""
    bits = masks[:, :, None] >> torch.arange(BITS_OF, device=masks.device, dtype=torch.int32) & 1
    return bits.flatten(1)[:, :vocab_size] != 0


def apply_masks(logits: torch.Tensor, masks: Sequence[torch.Tensor | None]) -> torch.Tensor:
    """Rule out, in the rows of `logits` [S, V] that have a mask [ceil(V / 32)] int32, every token whose bit is not set."""
    masked = {i: mask for i, mask in enumerate(masks) if mask is not None}
    if not masked:
        return logits
    logits = logits.clone()
    for i, mask in masked.items():
        logits[i].masked_fill_(~allowed_by(mask[None], logits.shape[1])[0], -torch.inf)
    return logits
