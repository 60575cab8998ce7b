"""Applies penalties, biases, masks and bad words to a row's logits, from its words on the device.

`adjusted_logits` is part of every kernel that reads a row's logits. It does not change the logits in memory: they are the
model's own distribution, and penalised logits rounded to bfloat16 would lose small penalties.
"""

from __future__ import annotations

import triton
import triton.language as tl

from folovllm import sampling_row
from folovllm.sampling_row import RowField

FLAGS, FREE_FROM = tl.constexpr(int(RowField.FLAGS)), tl.constexpr(int(RowField.FREE_FROM))
REPETITION = tl.constexpr(int(RowField.REPETITION))
PRESENCE, FREQUENCY = tl.constexpr(int(RowField.PRESENCE)), tl.constexpr(int(RowField.FREQUENCY))
NUM_FIELDS = tl.constexpr(len(RowField))
FILTERS, WORDS = tl.constexpr(sampling_row.FILTERS), tl.constexpr(sampling_row.WORDS)
COUNT, ENDS = tl.constexpr(sampling_row.COUNT), tl.constexpr(sampling_row.ENDS)
MASK, BAD = tl.constexpr(sampling_row.MASK), tl.constexpr(sampling_row.BAD)
MASK_AT, PLANES = tl.constexpr(sampling_row.MASK_AT), tl.constexpr(sampling_row.PLANES)
IN_PROMPT, BIAS_SHIFT = tl.constexpr(sampling_row.IN_PROMPT), tl.constexpr(sampling_row.BIAS_SHIFT)


@triton.jit
def float_field(field_ptr, FIELD: tl.constexpr):
    """Return a field of a row as a float."""
    return tl.load(field_ptr + FIELD).to(tl.float32, bitcast=True)


@triton.jit
def adjusted_logits(logits_ptr, word_ptr, field_ptr, position, index, vocab_size):
    """Return a row's logits at `index` with mask, bad words, bias, min_tokens and penalties: float32, in the shape of `index`.

    The pointers are the row's. NaN and indices outside the vocabulary become -inf. It reads only the parts of the row's line that
    its FLAGS name.
    """
    inside = index < vocab_size
    x = tl.load(logits_ptr + index, mask=inside, other=float("-inf")).to(tl.float32)
    x = tl.where(x == x, x, float("-inf"))
    flags = tl.load(field_ptr + FLAGS)
    if (flags & MASK) != 0:
        mask = tl.load(word_ptr + vocab_size + MASK_AT + PLANES * (index >> 5), mask=inside, other=0)
        x = tl.where(((mask >> (index & 31)) & 1) != 0, x, float("-inf"))
    if (flags & BAD) != 0:
        forbidden = tl.load(word_ptr + vocab_size + MASK_AT + PLANES * (index >> 5) + 1, mask=inside, other=0)
        x = tl.where(((forbidden >> (index & 31)) & 1) != 0, float("-inf"), x)
    if (flags & WORDS) != 0:
        word = tl.load(word_ptr + index, mask=inside, other=0)
        x += (word >> BIAS_SHIFT).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        count, factor = word & COUNT, float_field(field_ptr, REPETITION)
        repeated = tl.where(x > 0, tl.div_rn(x, tl.zeros_like(x) + factor), x * factor)
        x = tl.where((word & (COUNT | IN_PROMPT)) != 0, repeated, x)
        once = tl.where(count > 0, float_field(field_ptr, PRESENCE), 0.0)
        x -= once + float_field(field_ptr, FREQUENCY) * count.to(tl.float32)
        early = position < tl.load(field_ptr + FREE_FROM)
        x = tl.where(((word & ENDS) != 0) & early, float("-inf"), x)
    return x
