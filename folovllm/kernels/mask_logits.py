"""Masks logits with a token bitmask for each row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

WIDTH = 1024


@triton.jit(do_not_specialize_on_alignment=["mask_ptr"])
def mask_logits_kernel(logits_ptr, mask_ptr, out_ptr, stride_logits, stride_mask, vocab_size, WIDTH: tl.constexpr):
    """Program (row, tile): a tile of one row. Bit t % 32 of word t // 32 is set where token t may be sampled."""
    row = tl.program_id(0).to(tl.int64)
    index = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = index < vocab_size
    word = tl.load(mask_ptr + row * stride_mask + index // 32, mask=inside, other=0)
    value = tl.load(logits_ptr + row * stride_logits + index, mask=inside, other=0.0)
    is_allowed = ((word >> (index % 32)) & 1) != 0
    tl.store(out_ptr + row * vocab_size + index, tl.where(is_allowed, value, float("-inf")), mask=inside)


def mask_logits(logits: torch.Tensor, masks: torch.Tensor) -> torch.Tensor:
    """Return the logits [n, V] with -inf where the bit in `masks` [n, ceil(V / 32)] int32 is not set. Rows of both are contiguous."""
    num_rows, vocab_size = logits.shape
    out = torch.empty(num_rows, vocab_size, dtype=logits.dtype, device=logits.device)
    mask_logits_kernel[(num_rows, triton.cdiv(vocab_size, WIDTH))](
        logits, masks, out, logits.stride(0), masks.stride(0), vocab_size, WIDTH=WIDTH
    )
    return out
