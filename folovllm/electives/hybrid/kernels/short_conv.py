"""The short convolution over a ragged batch, and its state; in torch it is `hybrid.short_conv.convolve`, a sequence at a time."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from folovllm.kernels.pdl import launch_options, let_next_start, wait_for_inputs

CHANNELS = 128  # of a program
TOKENS = 32  # of a program, if a sequence has several new ones


@triton.jit
def load_inputs(x_ptr, state_ptr, at, query_len, fresh, c, stride_x, C: tl.constexpr, K: tl.constexpr):
    """Return a sequence's inputs [M, CHANNELS] at the places `at` [M]: -(K - 1) to -1 are in its state, 0 is its first new token.

    `x_ptr` points to that token, `state_ptr` to the slot. A sequence that starts (`fresh`) has zeros before its first token.
    """
    new = (at >= 0) & (at < query_len)
    old = (at < 0) & (at >= 1 - K) & (fresh == 0)
    inside = (c < C)[None, :]
    x = tl.load(
        x_ptr + tl.maximum(at, 0).to(tl.int64)[:, None] * stride_x + c[None, :], mask=new[:, None] & inside, other=0.0
    )
    kept = tl.load(
        state_ptr + tl.maximum(at + K - 1, 0)[:, None] * C + c[None, :], mask=old[:, None] & inside, other=0.0
    )
    return tl.where(new[:, None], x.to(tl.float32), kept.to(tl.float32))


@triton.jit
def store_state(x_ptr, state_ptr, query_len, fresh, c, stride_x, C: tl.constexpr, K: tl.constexpr, WIDTH: tl.constexpr):
    """Store the last K - 1 inputs as the state; some may come from the old state. WIDTH is the power of two from K - 1 up."""
    i = tl.arange(0, WIDTH)
    kept = load_inputs(x_ptr, state_ptr, query_len - (K - 1) + i, query_len, fresh, c, stride_x, C, K)
    mask = (i < K - 1)[:, None] & (c < C)[None, :]
    tl.debug_barrier()  # all threads have loaded before one of them stores: a row that is stored may be another thread's input
    tl.store(state_ptr + i[:, None] * C + c[None, :], kept.to(state_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["first_seq"], do_not_specialize_on_alignment=["start_ptr", "len_ptr", "row_ptr"])
def short_conv_kernel(
    x_ptr, out_ptr, state_ptr, weight_ptr, start_ptr, len_ptr, row_ptr, stride_x, first_seq,
    C: tl.constexpr, K: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr, TOKENS: tl.constexpr,
    COMPUTE_OUTPUT: tl.constexpr, UPDATE_STATE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (tile of channels, tile of tokens, sequence): the convolution of these tokens, and the state after the last of them.

    Other tiles of the sequence read the old state. So one launch may do both only if there is one tile of tokens. Otherwise
    the first launch has COMPUTE_OUTPUT, and the second one UPDATE_STATE.
    """
    let_next_start(PDL)
    wait_for_inputs(PDL)
    seq = first_seq + tl.program_id(2)
    start = tl.load(start_ptr + seq)
    query_len = tl.load(start_ptr + seq + 1) - start
    first = tl.program_id(1) * TOKENS
    if first < query_len:
        fresh = (tl.load(len_ptr + seq) - query_len <= 0).to(tl.int32)
        c = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
        x_ptr += start.to(tl.int64) * stride_x
        state_ptr += tl.load(row_ptr + seq).to(tl.int64) * (K - 1) * C
        if COMPUTE_OUTPUT:
            token = first + tl.arange(0, TOKENS)
            total = tl.zeros([TOKENS, CHANNELS], tl.float32)
            for j in tl.static_range(K):
                weight = tl.load(weight_ptr + c * K + j, mask=c < C, other=0.0).to(tl.float32)
                total += weight[None, :] * load_inputs(
                    x_ptr, state_ptr, token + (j - K + 1), query_len, fresh, c, stride_x, C, K
                )
            out = (total / (1 + tl.exp(-total))).to(out_ptr.dtype.element_ty)
            mask = (token < query_len)[:, None] & (c < C)[None, :]
            tl.store(out_ptr + (start + token).to(tl.int64)[:, None] * C + c[None, :], out, mask=mask)
        if UPDATE_STATE:
            store_state(x_ptr, state_ptr, query_len, fresh, c, stride_x, C, K, WIDTH)


def short_conv(
    x: torch.Tensor,
    state: torch.Tensor,
    weight: torch.Tensor,
    starts: torch.Tensor,
    seq_lens: torch.Tensor,
    rows: torch.Tensor,
    num_decodes: int,
    max_query_len: int,
) -> torch.Tensor:
    """Convolve all sequences of a batch: x [T, C] -> [T, C] in its dtype. Updates their states in place.

    Args:
        state: [slots, K - 1, C]. weight: [C, 1, K].
        starts: [S + 1], where each sequence's new tokens begin; seq_lens: [S], tokens after this step; rows: [S], slots.
        num_decodes: sequences at the front with one new token, or none for padding; the others have at most `max_query_len`.
    """
    channels, _, width = weight.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    tiles, num_prefills = triton.cdiv(channels, CHANNELS), len(rows) - num_decodes

    def launch(first: int, count: int, num_tokens: int, compute_output: bool, update_state: bool) -> None:
        tokens = TOKENS if num_tokens > 1 else 1
        num_tiles = triton.cdiv(num_tokens, tokens) if compute_output else 1
        short_conv_kernel[(tiles, num_tiles, count)](
            x, out, state, weight, starts, seq_lens, rows, x.stride(0), first, C=channels, K=width,
            WIDTH=triton.next_power_of_2(max(width - 1, 1)), CHANNELS=CHANNELS, TOKENS=tokens, COMPUTE_OUTPUT=compute_output,
            UPDATE_STATE=update_state, **launch_options(x.device, len(x)),
        )  # fmt: skip

    if num_decodes:
        launch(0, num_decodes, 1, True, True)
    if num_prefills:
        launch(num_decodes, num_prefills, max_query_len, True, False)
        launch(num_decodes, num_prefills, max_query_len, False, True)
    return out
