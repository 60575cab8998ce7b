"""The short convolution over a ragged batch, and its state; in torch it is `hybrid.short_conv.convolve`, a sequence at a time."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from folovllm.kernels.pdl import launch_options, let_next_start, wait_for_inputs

CHANNELS = 128  # of a program
TOKENS = 32  # of a program, if a sequence has several new ones


@triton.jit
def load_inputs(
    x_ptr, ring_ptr, at, query_len, position, c, stride_x, C: tl.constexpr, R: tl.constexpr, W: tl.constexpr
):
    """Return a sequence's inputs [M, CHANNELS] at the places `at` [M]: 0 is its first new token, those before are in its ring.

    `x_ptr` points to that token, `position` is its position. Before the first token of the sequence there are zeros.
    """
    new = (at >= 0) & (at < query_len)
    old = (at < 0) & (position + at >= 0)
    inside = (c < C)[None, :]
    x = tl.load(
        x_ptr + tl.maximum(at, 0).to(tl.int64)[:, None] * stride_x + c[None, :], mask=new[:, None] & inside, other=0.0
    )
    row = tl.maximum(position + at, 0) % R
    kept = tl.load(ring_ptr + row[:, None] * W + c[None, :], mask=old[:, None] & inside, other=0.0)
    return tl.where(new[:, None], x.to(tl.float32), kept.to(tl.float32))


@triton.jit
def store_inputs(
    x_ptr, ring_ptr, query_len, position, c, stride_x, C: tl.constexpr, R: tl.constexpr, W: tl.constexpr,
    COUNT: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Store the last COUNT new inputs in the ring, or all. WIDTH is the power of two from COUNT up."""
    i = tl.arange(0, WIDTH)
    at = tl.maximum(query_len - COUNT, 0) + i
    mask = ((i < COUNT) & (at < query_len))[:, None] & (c < C)[None, :]
    x = tl.load(x_ptr + at.to(tl.int64)[:, None] * stride_x + c[None, :], mask=mask, other=0.0)
    tl.debug_barrier()  # all threads have loaded before one of them stores: a row that is stored may be another thread's input
    tl.store(ring_ptr + ((position + at) % R)[:, None] * W + c[None, :], x.to(ring_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["first_seq"], do_not_specialize_on_alignment=["start_ptr", "len_ptr", "row_ptr"])
def short_conv_kernel(
    x_ptr, out_ptr, ring_ptr, weight_ptr, start_ptr, len_ptr, row_ptr, stride_x, first_seq,
    C: tl.constexpr, K: tl.constexpr, R: tl.constexpr, W: tl.constexpr, COUNT: tl.constexpr, WIDTH: tl.constexpr,
    CHANNELS: tl.constexpr, TOKENS: tl.constexpr, MOST_STORED: tl.constexpr, COMPUTE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (tile of channels, tile of tokens, sequence): the convolution of these tokens; the first tile also stores the inputs.

    No other tile reads the ring: TOKENS is at least K - 1, unless there is one tile alone. But if a step may keep inputs,
    the delta rule reads the ring afterwards, and more than MOST_STORED inputs would be stored over what it reads. So these have
    a second launch behind it, without COMPUTE.
    """
    let_next_start(PDL)
    wait_for_inputs(PDL)
    seq = first_seq + tl.program_id(2)
    start = tl.load(start_ptr + seq)
    query_len = tl.load(start_ptr + seq + 1) - start
    first = tl.program_id(1) * TOKENS
    if first < query_len:
        position = tl.maximum(tl.load(len_ptr + seq) - query_len, 0)  # of the first new token
        c = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
        x_ptr += start.to(tl.int64) * stride_x
        ring_ptr += tl.load(row_ptr + seq).to(tl.int64) * R * W
        if COMPUTE:
            token = first + tl.arange(0, TOKENS)
            total = tl.zeros([TOKENS, CHANNELS], tl.float32)
            for j in tl.static_range(K):
                weight = tl.load(weight_ptr + c * K + j, mask=c < C, other=0.0).to(tl.float32)
                total += weight[None, :] * load_inputs(
                    x_ptr, ring_ptr, token + (j - K + 1), query_len, position, c, stride_x, C, R, W
                )
            out = (total / (1 + tl.exp(-total))).to(out_ptr.dtype.element_ty)
            mask = (token < query_len)[:, None] & (c < C)[None, :]
            tl.store(out_ptr + (start + token).to(tl.int64)[:, None] * C + c[None, :], out, mask=mask)
        stores = query_len <= MOST_STORED if COMPUTE else query_len > MOST_STORED
        if (first == 0) & stores:
            store_inputs(x_ptr, ring_ptr, query_len, position, c, stride_x, C, R, W, COUNT, WIDTH)


def short_conv(
    x: torch.Tensor,
    ring: torch.Tensor,
    weight: torch.Tensor,
    starts: torch.Tensor,
    seq_lens: torch.Tensor,
    rows: torch.Tensor,
    num_decodes: int,
    max_query_len: int,
    most_kept: int = 0,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Convolve all sequences of a batch: x [T, C] -> [T, C] in its dtype. Stores the last inputs of each in its ring.

    Args:
        ring: [slots, R, W], its first C columns (`inputs`); R is at least K - 1. weight: [C, 1, K].
        starts: [S + 1], where each sequence's new tokens begin; seq_lens: [S], tokens after this step; rows: [S], slots.
        num_decodes: sequences at the front with one new token, or none for padding; the others have at most `max_query_len`.
        most_kept: if not 0, sequences with more new tokens store theirs in a second call behind the delta rule.
        out: the result of the first call, in the second one.
    """
    channels, _, width = weight.shape
    is_first, size = out is None, ring.shape[1:]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    tiles, num_prefills = triton.cdiv(channels, CHANNELS), len(rows) - num_decodes

    def launch(first: int, count: int, num_tokens: int, tokens: int, stored: int) -> None:
        short_conv_kernel[(tiles, triton.cdiv(num_tokens, tokens) if is_first else 1, count)](
            x, out, ring, weight, starts, seq_lens, rows, x.stride(0), first, C=channels, K=width, R=size[0],
            W=size[1], COUNT=stored, WIDTH=triton.next_power_of_2(stored), CHANNELS=CHANNELS, TOKENS=tokens,
            MOST_STORED=most_kept or 1 << 30, COMPUTE=is_first, **launch_options(x.device, len(x)),
        )  # fmt: skip

    if num_decodes and is_first:
        launch(0, num_decodes, 1, 1, 1)
    if num_prefills and (is_first or max_query_len > most_kept):
        stored = (is_first and most_kept) or max(
            1, width - 1
        )  # a state is whole behind a long sequence: nothing is kept
        launch(num_decodes, num_prefills, max_query_len, max(TOKENS, triton.next_power_of_2(width)), stored)
    return out
