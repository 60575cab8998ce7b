"""Applies penalties, biases, bad words and token bitmasks to a row's logits, from its state on the device.

`adjusted_logits` is part of every kernel that reads a row's logits. It does not change the logits in memory: they are the
model's own distribution, and penalised logits rounded to bfloat16 would lose small penalties.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

import folovllm.sample.sampling_row as sampling_row
from folovllm.sample.sampling_row import RowField

FLAGS, FREE_FROM = tl.constexpr(int(RowField.FLAGS)), tl.constexpr(int(RowField.FREE_FROM))
REPETITION = tl.constexpr(int(RowField.REPETITION))
PRESENCE, FREQUENCY = tl.constexpr(int(RowField.PRESENCE)), tl.constexpr(int(RowField.FREQUENCY))
NUM_FIELDS = tl.constexpr(len(RowField))
FILTERS, MASK = tl.constexpr(sampling_row.FILTERS), tl.constexpr(sampling_row.MASK)
WORDS, ONLY_ALLOWED = tl.constexpr(sampling_row.WORDS), tl.constexpr(sampling_row.ONLY_ALLOWED)
COUNT, BIAS_SHIFT = tl.constexpr(sampling_row.COUNT), tl.constexpr(sampling_row.BIAS_SHIFT)
ENDS, IN_PROMPT = tl.constexpr(sampling_row.ENDS), tl.constexpr(sampling_row.IN_PROMPT)
ALLOWED, COMPLETES = tl.constexpr(sampling_row.ALLOWED), tl.constexpr(sampling_row.COMPLETES)
WORDS_AT = tl.constexpr(sampling_row.WORDS_AT)


class StepRows(NamedTuple):
    """What kernels read of the rows of S samples (`SamplerState`), in the order of their arguments."""

    fields: torch.Tensor  # [rows, len(RowField)] int32
    lines: torch.Tensor  # [rows, line_width(V)] int32
    masks: torch.Tensor  # [at least S, ceil(V / 32)] int32, token bitmasks by sample
    rows: torch.Tensor  # [S] int32
    positions: torch.Tensor  # [S] int32, index of the token to sample in its sequence

    @property
    def strides(self) -> tuple[int, int]:
        """The strides of lines and bitmasks."""
        return self.lines.stride(0), self.masks.stride(0)


@triton.jit
def float_field(field_ptr, FIELD: tl.constexpr):
    """Return a field of a row as a float."""
    return tl.load(field_ptr + FIELD).to(tl.float32, bitcast=True)


@triton.jit
def adjusted_logits(row, index):
    """Return a row's logits at `index` as `SamplerState.adjust` does: float32, in the shape of `index`.

    `row` is (logits, line, mask, fields, position, V): four pointers to what is the row's, and two numbers. NaN and indices
    outside the vocabulary become -inf. It reads only the parts of the row's state that its FLAGS name.
    """
    logits_ptr, line_ptr, mask_ptr, field_ptr, position, vocab_size = row
    inside = index < vocab_size
    x = tl.load(logits_ptr + index, mask=inside, other=float("-inf")).to(tl.float32)
    x = tl.where(x == x, x, float("-inf"))
    flags = tl.load(field_ptr + FLAGS)
    if (flags & MASK) != 0:
        mask = tl.load(mask_ptr + (index >> 5), mask=inside, other=0)
        x = tl.where(((mask >> (index & 31)) & 1) != 0, x, float("-inf"))
    if (flags & WORDS) != 0:
        word = tl.load(line_ptr + WORDS_AT + index, mask=inside, other=0)
        x += (word >> BIAS_SHIFT).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        count, factor = word & COUNT, float_field(field_ptr, REPETITION)
        repeated = tl.where(x > 0, tl.div_rn(x, tl.zeros_like(x) + factor), x * factor)
        x = tl.where((word & (COUNT | IN_PROMPT)) != 0, repeated, x)
        once = tl.where(count > 0, float_field(field_ptr, PRESENCE), 0.0)
        x -= once + float_field(field_ptr, FREQUENCY) * count.to(tl.float32)
        # Which bits of a word forbid its token. ALLOWED does where it is missing.
        forbids = COMPLETES | tl.where(position < tl.load(field_ptr + FREE_FROM), ENDS, 0)
        forbids |= tl.where((flags & ONLY_ALLOWED) != 0, ALLOWED, 0)
        x = tl.where(((word ^ ALLOWED) & forbids) != 0, float("-inf"), x)
    return x
