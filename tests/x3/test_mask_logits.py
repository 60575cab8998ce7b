"""A mask for each row of logits, in one kernel; and a step with drafts whose grammar leads nowhere."""

from __future__ import annotations

import pytest
import torch

from folovllm.sample.masks import bits_of
from tests.m6.devices import DEVICE

pytest.importorskip("triton", reason="Triton is for Linux only")

from folovllm.kernels.mask_logits import mask_logits


@pytest.mark.parametrize("vocab_size", [70, 1056])
def test_it_equals_torch(vocab_size: int) -> None:
    """Rows of logits wider than the vocabulary, as several ranks leave them; masks that begin anywhere."""
    torch.manual_seed(0)
    logits = torch.randn(3, vocab_size + 6, device=DEVICE)[:, :vocab_size]
    width = -(-vocab_size // 32)
    numbers = torch.randint(-(2**31), 2**31 - 1, (9 + 3 * width,), dtype=torch.int32, device=DEVICE)
    masks = numbers[9:].view(3, width)
    expected = logits.masked_fill(~bits_of(masks, vocab_size), -torch.inf)
    assert torch.equal(mask_logits(logits, masks), expected)
