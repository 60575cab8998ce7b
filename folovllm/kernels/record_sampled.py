"""Records a sampled token in its row on the device: its count, and the tokens that would now complete a bad word."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from folovllm import sampling_row
from folovllm.kernels.penalties import BAD, COUNT, FLAGS, MASK_AT, NUM_FIELDS, PLANES, WORDS

MAX_BAD_WORDS, RECENT = tl.constexpr(sampling_row.MAX_BAD_WORDS), tl.constexpr(sampling_row.RECENT)
BAD_ENDS_AT, BAD_TOKENS_AT = tl.constexpr(sampling_row.BAD_ENDS_AT), tl.constexpr(sampling_row.BAD_TOKENS_AT)
RECENT_AT = tl.constexpr(sampling_row.RECENT_AT)


@triton.jit
def forbid_next(line_ptr, token, position):
    """Do what `forbid_next` in `folovllm/sample/bad_words.py` does, one bad word a thread. `line_ptr`: the part behind the words."""
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
    plane_ptr = line_ptr + MASK_AT + PLANES * (last >> 5) + 1
    tl.store(plane_ptr, 0, mask=here)
    tl.debug_barrier()  # all threads clear before one of them sets a bit
    tl.atomic_or(plane_ptr, tl.full([MAX_BAD_WORDS], 1, tl.int32) << (last & 31), mask=matches)


@triton.jit(do_not_specialize_on_alignment=["token_ptr", "row_ptr", "position_ptr", "counts_ptr"])
def record_sampled_kernel(
    token_ptr, row_ptr, position_ptr, counts_ptr, field_ptr, word_ptr, stride_words, vocab_size, ALL: tl.constexpr
):
    """Program (sequence): records its sampled token (see `record_sampled`)."""
    s = tl.program_id(0)
    row = tl.load(row_ptr + s).to(tl.int64)
    flags = tl.load(field_ptr + row * NUM_FIELDS + FLAGS) & (WORDS | BAD)
    if not ALL:
        flags = tl.where(tl.load(counts_ptr + s) != 0, flags, 0)
    if flags == 0:
        return
    line_ptr, token = word_ptr + row * stride_words, tl.load(token_ptr + s).to(tl.int32)
    if (flags & WORDS) != 0:
        word = tl.load(line_ptr + token)
        tl.store(line_ptr + token, tl.where((word & COUNT) < COUNT, word + 1, word))
    if (flags & BAD) != 0:
        forbid_next(line_ptr + vocab_size, token, tl.load(position_ptr + s))


def record_sampled(
    tokens: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
    counts: torch.Tensor | None,
    fields: torch.Tensor,
    words: torch.Tensor,
    vocab_size: int,
) -> None:
    """Count each sampled token in its row's word if the row has WORDS, and update its bad words if it has BAD.

    Args:
        tokens: [S] int64. rows: [S] int32, each row once; the padding row, which has no flags, any number of times.
        positions: [S] int32, of the tokens.
        counts: [S], not 0 where the token counts; None: all do.
        fields: [rows, len(RowField)] int32. words: [rows, line_width(V)] int32, changed in place.
    """
    record_sampled_kernel[(len(tokens),)](
        tokens, rows, positions, rows if counts is None else counts, fields, words, words.stride(0), vocab_size,
        ALL=counts is None, num_warps=4,
    )  # fmt: skip
