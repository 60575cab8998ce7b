"""What a request rules out or makes likelier whatever the model says: a mask, bad words, biases."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from folovllm.draw_row import BITS_OF, Int32, mask_of
from folovllm.step.draw import DrawSpec, about_to_end


class RowRules:
    """The rules of one row, and of its answer what they depend on."""

    def __init__(self, spec: DrawSpec, vocab_size: int, device: torch.device) -> None:
        self._device = device
        self._mask: torch.Tensor | None = None  # [V] bool
        self._vocab_size = vocab_size
        self._bad_words = spec.bad_words
        self._answer = spec.answer.tolist() if spec.bad_words else []
        self._biased = torch.tensor([token for token, _ in spec.bias], dtype=torch.int64, device=device)
        bias = np.array([value for _, value in spec.bias], np.float16)  # the precision that a row's words have
        self._bias = torch.from_numpy(bias).to(device, torch.float32)
        if spec.has_mask:
            self.set_mask(mask_of(spec.allowed or (), vocab_size))

    def set_mask(self, mask: Int32) -> None:
        """A new mask, [ceil(V / 32)], from the next draw on."""
        self._mask = bits_of(torch.from_numpy(mask).to(self._device)[None], self._vocab_size)[0]

    def note(self, tokens: list[int]) -> None:
        """Take in tokens of the answer."""
        if self._bad_words:
            self._answer += tokens

    def apply(self, row: torch.Tensor) -> torch.Tensor:
        """The logits [V] of the next token, float32: mask, bad words, bias."""
        row = row.clone() if self._mask is None else row.masked_fill(~self._mask, -torch.inf)
        row[about_to_end(self._bad_words, self._answer)] = -torch.inf
        return row.index_add_(0, self._biased, self._bias)


def bits_of(masks: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Masks [n, ceil(V / 32)] int32 as [n, V] bool."""
    bits = masks[:, :, None] >> torch.arange(BITS_OF, device=masks.device, dtype=torch.int32) & 1
    return bits.flatten(1)[:, :vocab_size] != 0


def without_masked(logits: torch.Tensor, masks: torch.Tensor) -> torch.Tensor:
    """The logits [n, V] with -inf where the masks [n, ceil(V / 32)] int32 have no bit."""
    if logits.is_cuda:
        from folovllm.kernels.mask_logits import mask_logits

        return mask_logits(logits, masks)
    return logits.masked_fill(~bits_of(masks, logits.shape[1]), -torch.inf)


def apply_rules(logits: torch.Tensor, rules: Sequence[RowRules | None]) -> torch.Tensor:
    """Apply the rules of those rows of `logits` [S, V] float32 that have any."""
    if not any(rules):
        return logits
    logits = logits.clone()
    for i, own in enumerate(rules):
        if own is not None:
            logits[i] = own.apply(logits[i])
    return logits
