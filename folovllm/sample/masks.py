"""Token bitmasks on the device: a bit for each token says whether it may be sampled."""

from __future__ import annotations

import torch

from folovllm.sampling_row import BITS_OF


def bits_of(masks: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Expand masks [n, ceil(V / 32)] int32 to [n, V] bool."""
    bits = masks[:, :, None] >> torch.arange(BITS_OF, device=masks.device, dtype=torch.int32) & 1
    return bits.flatten(1)[:, :vocab_size] != 0


def without_masked(logits: torch.Tensor, masks: torch.Tensor) -> torch.Tensor:
    """Return the logits [n, V] with -inf where the bit in the masks [n, ceil(V / 32)] int32 is not set."""
    if logits.is_cuda:
        from folovllm.kernels.mask_logits import mask_logits

        return mask_logits(logits, masks)
    return logits.masked_fill(~bits_of(masks, logits.shape[1]), -torch.inf)
