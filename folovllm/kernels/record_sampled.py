"""Records a sampled token in its row on the device: its count, and the tokens that would complete a bad word now."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

import folovllm.sample.sampling_row as sampling_row
from folovllm.kernels.penalties import COMPLETES, COUNT, FLAGS, NUM_FIELDS, WORDS_AT

MAX_BAD_WORDS, RECENT = tl.constexpr(sampling_row.MAX_BAD_WORDS), tl.constexpr(sampling_row.RECENT)
BAD_ENDS_AT, BAD_TOKENS_AT = tl.constexpr(sampling_row.BAD_ENDS_AT), tl.constexpr(sampling_row.BAD_TOKENS_AT)
RECENT_AT = tl.constexpr(sampling_row.RECENT_AT)
COUNTED, BAD_WORDS = tl.constexpr(sampling_row.COUNTED), tl.constexpr(sampling_row.BAD_WORDS)


@triton.jit
def mark_bad_words(line_ptr, token, position):
    """Do what `mark_bad_words` in `folovllm/sample/sampler_state.py` does, one bad word a thread."""
    tl.store(line_ptr + RECENT_AT + position % RECENT, token + 1)
    word = tl.arange(0, MAX_BAD_WORDS)
    end = tl.load(line_ptr + BAD_ENDS_AT + word)
    start = tl.load(line_ptr + BAD_ENDS_AT + word - 1, mask=word > 0, other=0)
    token_ptr = line_ptr + BAD_TOKENS_AT + end - 1
    here = end > 0
    last = tl.load(token_ptr, mask=here, other=0)
    matches = here & ((end - start == 1) | (tl.load(token_ptr - 1, mask=here & (end - start > 1), other=-1) == token))
    for back in range(2, tl.max(end - start)):
        asked = here & (end - start > back)
        recent = tl.load(line_ptr + RECENT_AT + (position + 1 - back) % RECENT, mask=position >= back - 1, other=0)
        matches &= (asked == 0) | (tl.load(token_ptr - back, mask=asked, other=-1) + 1 == recent)
    word_ptr, bit = line_ptr + WORDS_AT + last, tl.full([MAX_BAD_WORDS], COMPLETES, tl.int32)
    tl.atomic_and(word_ptr, ~bit, mask=here)
    tl.debug_barrier()  # all threads clear before one of them sets a bit
    tl.atomic_or(word_ptr, bit, mask=matches)


@triton.jit(do_not_specialize_on_alignment=["token_ptr", "row_ptr", "position_ptr", "counts_ptr"])
def record_sampled_kernel(
    token_ptr, row_ptr, position_ptr, counts_ptr, field_ptr, line_ptr, stride_lines, ALL: tl.constexpr
):
    """Program (sequence): records its sampled token (see `record_sampled`)."""
    s = tl.program_id(0)
    row = tl.load(row_ptr + s).to(tl.int64)
    flags = tl.load(field_ptr + row * NUM_FIELDS + FLAGS) & (COUNTED | BAD_WORDS)
    if not ALL:
        flags = tl.where(tl.load(counts_ptr + s) != 0, flags, 0)
    if flags == 0:
        return
    line_ptr, token = line_ptr + row * stride_lines, tl.load(token_ptr + s).to(tl.int32)
    if (flags & COUNTED) != 0:  # atomic, because other threads change other bits of the same word
        word_ptr = line_ptr + WORDS_AT + token
        tl.atomic_add(word_ptr, 1, mask=(tl.load(word_ptr) & COUNT) < COUNT)
    if (flags & BAD_WORDS) != 0:
        mark_bad_words(line_ptr, token, tl.load(position_ptr + s))


def record_sampled(
    tokens: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
    counts: torch.Tensor | None,
    fields: torch.Tensor,
    lines: torch.Tensor,
) -> None:
    """Count each sampled token if its row has COUNTED, and mark the tokens that complete a bad word if it has BAD_WORDS.

    Args:
        tokens: [S] int64. rows: [S] int32, each row once; the padding row, which has no flags, any number of times.
        positions: [S] int32, of the tokens.
        counts: [S], not 0 where the token counts; None: all do.
        fields: [rows, len(RowField)] int32. lines: [rows, line_width(V)] int32, changed in place.
    """
    record_sampled_kernel[(len(tokens),)](
        tokens, rows, positions, rows if counts is None else counts, fields, lines, lines.stride(0),
        ALL=counts is None, num_warps=4,
    )  # fmt: skip
