"""The router's choice and the order of its pairs, in one kernel for few tokens and two for many; and what the experts said, added up.

At batch 1 a layer with experts reads 8 of 128 of them in a few microseconds. Softmax, top-k, a division, a sort and a search,
each a kernel of its own, would take longer than that.

The order is a counting sort. A program has a chunk of tokens: a pair goes behind those of lower experts, those of its expert in
earlier chunks, and those of its expert in its own chunk before it. One chunk knows all that. Where there are more, each writes
down how many pairs of each expert it has, and a second kernel adds these counts up.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from folovllm.kernels.pdl import launch_options, let_next_start, wait_for_inputs

CHUNK_PAIRS = 128  # of a chunk's tokens: each of them meets each
STEP = 32  # chunks whose counts are read at a time


@triton.jit
def pairs_of_chunk(chosen, token, num_tokens, first, held, TOP_K: tl.constexpr):
    """Of the experts that a chunk's tokens ask, `chosen` [TOKENS, CHOICES]: the key, the number, and whether it is there, of each
    pair [TOKENS * CHOICES]. The key is the expert, counted from this rank's first; `held` if another rank has it.
    """
    SIZE: tl.constexpr = chosen.shape[0] * chosen.shape[1]
    j = tl.arange(0, chosen.shape[1])
    real = tl.reshape((token < num_tokens)[:, None] & (j < TOP_K)[None, :], [SIZE])
    pair = tl.reshape(token[:, None] * TOP_K + j[None, :], [SIZE])
    key = tl.reshape(chosen, [SIZE]) - first
    key = tl.where((key >= 0) & (key < held), key, held)
    return tl.where(real, key, -1), pair, real


@triton.jit
def count_keys(key, WIDTH: tl.constexpr):
    """How many pairs have each key, [WIDTH]."""
    return tl.sum((key[:, None] == tl.arange(0, WIDTH)[None, :]).to(tl.int32), 0)


@triton.jit
def store_order(order_ptr, starts_ptr, key, pair, real, totals, before, held):
    """Put a chunk's pairs in their places. `totals` [WIDTH] are the pairs of each key, `before` those of earlier chunks."""
    e, i = tl.arange(0, totals.shape[0]), tl.arange(0, key.shape[0])
    start = tl.cumsum(totals, 0) - totals
    earlier = (key[:, None] == key[None, :]) & (i[:, None] < i[None, :])
    place = tl.gather(start + before, tl.maximum(key, 0), 0) + tl.sum(earlier.to(tl.int32), 0)
    tl.store(order_ptr + place, pair.to(tl.int64), mask=real)
    tl.store(starts_ptr + e, start.to(tl.int64), mask=e < held)
    tl.store(starts_ptr + held, tl.sum(tl.where(e < held, totals, 0), 0).to(tl.int64))


@triton.jit(do_not_specialize=["num_tokens", "first", "held"])
def choose_kernel(
    logits_ptr, weights_ptr, experts_ptr, order_ptr, starts_ptr, count_ptr, num_tokens, first, held, E: tl.constexpr,
    WIDTH: tl.constexpr, TOP_K: tl.constexpr, CHOICES: tl.constexpr, TOKENS: tl.constexpr, NORMALISE: tl.constexpr,
    ALONE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program p: tokens p * TOKENS to p * TOKENS + TOKENS. ALONE: order and starts too; else how often each key occurs.

    The largest logit is taken out TOP_K times; of equal ones the lowest expert, as `moe.layers.route` has it. CHOICES is a
    power of two, TOP_K or more.
    """
    let_next_start(PDL)
    wait_for_inputs(PDL)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    e, j = tl.arange(0, WIDTH)[None, :], tl.arange(0, CHOICES)[None, :]
    inside = (token < num_tokens)[:, None]
    logits = tl.load(logits_ptr + token[:, None] * E + e, mask=inside & (e < E), other=0.0).to(tl.float32)
    logits = tl.where(e < E, logits, float("-inf"))  # [TOKENS, WIDTH]
    best = tl.full((TOKENS, CHOICES), float("-inf"), tl.float32)
    chosen = tl.zeros((TOKENS, CHOICES), tl.int32)
    rest = logits
    for i in tl.static_range(TOP_K):
        value, expert = tl.max(rest, 1, return_indices=True)
        best = tl.where(j == i, value[:, None], best)
        chosen = tl.where(j == i, expert[:, None], chosen)
        rest = tl.where(e == expert[:, None], float("-inf"), rest)
    largest = tl.max(best, 1)[:, None]
    weights = tl.exp(best - largest)
    total = tl.sum(weights, 1) if NORMALISE else tl.sum(tl.exp(logits - largest), 1)
    at, kept = token[:, None] * TOP_K + j, inside & (j < TOP_K)
    tl.store(weights_ptr + at, weights / total[:, None], mask=kept)
    tl.store(experts_ptr + at, chosen.to(tl.int64), mask=kept)
    key, pair, real = pairs_of_chunk(chosen, token, num_tokens, first, held, TOP_K)
    counts = count_keys(key, WIDTH)
    if ALONE:
        store_order(order_ptr, starts_ptr, key, pair, real, counts, tl.zeros_like(counts), held)
    else:
        tl.store(count_ptr + tl.program_id(0) * WIDTH + tl.arange(0, WIDTH), counts)


@triton.jit(do_not_specialize=["num_tokens", "first", "held", "num_chunks"])
def order_kernel(
    experts_ptr, count_ptr, order_ptr, starts_ptr, num_tokens, first, held, num_chunks, WIDTH: tl.constexpr,
    TOP_K: tl.constexpr, CHOICES: tl.constexpr, TOKENS: tl.constexpr, STEP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program p: the pairs of chunk p, whose counts `choose_kernel` wrote, into their places. All write the same starts."""
    let_next_start(PDL)
    wait_for_inputs(PDL)
    chunk = tl.program_id(0)
    token, j = chunk * TOKENS + tl.arange(0, TOKENS), tl.arange(0, CHOICES)[None, :]
    kept = (token < num_tokens)[:, None] & (j < TOP_K)
    chosen = tl.load(experts_ptr + token[:, None] * TOP_K + j, mask=kept, other=0).to(tl.int32)
    totals, before = tl.zeros((STEP, WIDTH), tl.int32), tl.zeros((STEP, WIDTH), tl.int32)
    for begin in range(0, num_chunks, STEP):
        other = begin + tl.arange(0, STEP)[:, None]
        at = count_ptr + other * WIDTH + tl.arange(0, WIDTH)[None, :]
        counts = tl.load(at, mask=other < num_chunks, other=0).to(tl.int32)
        totals += counts
        before += tl.where(other < chunk, counts, 0)
    key, pair, real = pairs_of_chunk(chosen, token, num_tokens, first, held, TOP_K)
    store_order(order_ptr, starts_ptr, key, pair, real, tl.sum(totals, 0), tl.sum(before, 0), held)


def choose(
    logits: torch.Tensor, top_k: int, normalise: bool, held: range
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The experts that each token asks, as `moe.layers.route`, and the order of the pairs, as `moe.layers.sort_by_expert`.

    Args:
        logits: [T, E], contiguous. held: the experts of this rank.

    Returns:
        Weights and experts, [T, k] each; the pairs' `order` [T * k] and the `starts` of the experts held, one more than
        they are.
    """
    num_tokens, num_experts = logits.shape
    weights = torch.empty(num_tokens, top_k, dtype=logits.dtype, device=logits.device)
    experts = torch.empty(num_tokens, top_k, dtype=torch.int64, device=logits.device)
    order = experts.new_empty(num_tokens * top_k)
    if num_tokens == 0:
        return weights, experts, order, experts.new_zeros(len(held) + 1)
    starts = experts.new_empty(len(held) + 1)
    width, choices = triton.next_power_of_2(num_experts), triton.next_power_of_2(top_k)
    tokens = triton.next_power_of_2(num_tokens)  # so that all steps between two powers share a variant
    alone = tokens * choices <= CHUNK_PAIRS
    tokens = min(tokens, max(1, CHUNK_PAIRS // choices))
    num_chunks = triton.cdiv(num_tokens, tokens)
    counts = order if alone else torch.empty(num_chunks, width, dtype=torch.int16, device=logits.device)
    shape = {"WIDTH": width, "TOP_K": top_k, "CHOICES": choices, "TOKENS": tokens}
    shape |= launch_options(logits.device, num_tokens)
    choose_kernel[(num_chunks,)](
        logits, weights, experts, order, starts, counts, num_tokens, held.start, len(held), E=num_experts,
        NORMALISE=normalise, ALONE=alone, num_warps=min(8, tokens), **shape,
    )  # fmt: skip
    if not alone:
        order_kernel[(num_chunks,)](
            experts, counts, order, starts, num_tokens, held.start, len(held), num_chunks, STEP=STEP, num_warps=4,
            **shape,
        )  # fmt: skip
    return weights, experts, order, starts


@triton.jit
def combine_kernel(
    answers_ptr, weights_ptr, out_ptr, H: tl.constexpr, TOP_K: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """Program (token, tile of WIDTH columns): the TOP_K answers to the token, added up by weight in float32.

    `answers` [T, TOP_K, H], `weights` [T, TOP_K] and `out` [T, H] are contiguous. The last tile may reach past H.
    """
    token, h = tl.program_id(0).to(tl.int64), tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    total = tl.zeros((WIDTH,), tl.float32)
    for j in tl.static_range(TOP_K):
        answer = tl.load(answers_ptr + (token * TOP_K + j) * H + h, mask=h < H, other=0.0)
        total += answer.to(tl.float32) * tl.load(weights_ptr + token * TOP_K + j).to(tl.float32)
    tl.store(out_ptr + token * H + h, total.to(out_ptr.dtype.element_ty), mask=h < H)


@triton.jit
def late_combine_kernel(
    answers_ptr, weights_ptr, out_ptr, H: tl.constexpr, TOP_K: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """`combine_kernel`, in a program that may be there before the answers are."""
    let_next_start(PDL)
    wait_for_inputs(PDL)
    combine_kernel(answers_ptr, weights_ptr, out_ptr, H, TOP_K, WIDTH)


def combine(answers: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the weighted sums (`moe.layers.combine`): answers [T, k, H], contiguous, and weights [T, k] -> [T, H]."""
    num_tokens, top_k, hidden = answers.shape
    out = answers.new_empty(num_tokens, hidden)
    if num_tokens:
        width = min(1024, triton.next_power_of_2(hidden))
        late_combine_kernel[(num_tokens, triton.cdiv(hidden, width))](
            answers, weights, out, H=hidden, TOP_K=top_k, WIDTH=width, **launch_options(answers.device, num_tokens)
        )
    return out
