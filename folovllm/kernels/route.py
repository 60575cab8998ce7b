"""The router's choice and the order of its pairs, in one kernel for few tokens; and what the experts said, added up.

At batch 1 a layer with experts reads 8 of 128 of them in a few microseconds. Softmax, top-k, a division, a sort and a search,
each a kernel of its own, would take longer than that.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

MOST_PAIRS = 128  # that one program sorts, each against each


@triton.jit(do_not_specialize=["num_tokens", "first", "held"])
def choose_kernel(
    logits_ptr, weights_ptr, experts_ptr, order_ptr, starts_ptr, num_tokens, first, held, E: tl.constexpr,
    WIDTH: tl.constexpr, TOP_K: tl.constexpr, TOKENS: tl.constexpr, NORMALISE: tl.constexpr, SORT: tl.constexpr,
    PAIRS: tl.constexpr,
):  # fmt: skip
    """Program p: tokens p * TOKENS to p * TOKENS + TOKENS. SORT, where there is one program: order and starts as well.

    The largest logit is taken out TOP_K times; of equal ones the lowest expert, as `layers.moe.route` has it.
    """
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    e, inside = tl.arange(0, WIDTH), token < num_tokens
    mask = inside[:, None] & (e < E)[None, :]
    logits = tl.load(logits_ptr + token[:, None] * E + e[None, :], mask=mask, other=0.0).to(tl.float32)
    logits = tl.where((e < E)[None, :], logits, float("-inf"))  # [TOKENS, WIDTH]
    largest = tl.max(logits, 1)
    total = tl.sum(tl.exp(logits - largest[:, None]), 1)
    if NORMALISE:
        rest = logits
        total = tl.zeros((TOKENS,), tl.float32)
        for _ in tl.static_range(TOP_K):
            total += tl.exp(tl.max(rest, 1) - largest)
            rest = tl.where(e[None, :] == tl.argmax(rest, 1)[:, None], float("-inf"), rest)
    rest = logits
    for j in tl.static_range(TOP_K):
        chosen = tl.argmax(rest, 1)
        weight = tl.exp(tl.max(rest, 1) - largest) / total
        tl.store(weights_ptr + token * TOP_K + j, weight, mask=inside)
        tl.store(experts_ptr + token * TOP_K + j, chosen.to(tl.int64), mask=inside)
        rest = tl.where(e[None, :] == chosen[:, None], float("-inf"), rest)
    if SORT:
        tl.debug_barrier()  # other threads wrote what is read now
        pair = tl.arange(0, PAIRS)
        real = pair < num_tokens * TOP_K
        expert = (tl.load(experts_ptr + pair, mask=real, other=0) - first).to(tl.int32)
        expert = tl.where((expert >= 0) & (expert < held), expert, held)
        expert = tl.where(real, expert, held + 1)
        before = (expert[:, None] > expert[None, :]) | (
            (expert[:, None] == expert[None, :]) & (pair[:, None] > pair[None, :])
        )
        place = tl.sum(before.to(tl.int32), 1)  # [PAIRS]
        tl.store(order_ptr + place, pair.to(tl.int64), mask=real)
        start = tl.sum((expert[None, :] < e[:, None]).to(tl.int32), 1)  # [WIDTH]
        tl.store(starts_ptr + e, start.to(tl.int64), mask=e < held)
        tl.store(starts_ptr + held, tl.sum((expert < held).to(tl.int64), 0))


def choose(
    logits: torch.Tensor, top_k: int, normalise: bool, held: range
) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, torch.Tensor] | None]:
    """The experts that each token asks, as `layers.moe.route`.

    Args:
        logits: [T, E], contiguous. held: the experts of this rank.

    Returns:
        Weights and experts, [T, k] each; and where the pairs are few, their `order` and `starts`
        (`layers.moe.sort_by_expert`).
    """
    num_tokens, num_experts = logits.shape
    pairs, tokens = num_tokens * top_k, triton.next_power_of_2(num_tokens)
    weights = torch.empty(num_tokens, top_k, dtype=logits.dtype, device=logits.device)
    experts = torch.empty(num_tokens, top_k, dtype=torch.int64, device=logits.device)
    few = 0 < tokens * top_k <= MOST_PAIRS  # a power of two decides, so that all steps between two share a variant
    order = experts.new_empty(pairs) if few else experts
    starts = experts.new_empty(len(held) + 1) if few else experts
    if num_tokens:
        choose_kernel[(1 if few else num_tokens,)](
            logits, weights, experts, order, starts, num_tokens, held.start, len(held), E=num_experts,
            WIDTH=triton.next_power_of_2(num_experts), TOP_K=top_k,
            TOKENS=tokens if few else 1, NORMALISE=normalise, SORT=few,
            PAIRS=triton.next_power_of_2(tokens * top_k) if few else 1, num_warps=8 if few else 4,
        )  # fmt: skip
    return weights, experts, (order, starts) if few else None


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


def combine(answers: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """As `layers.moe.combine`: answers [T, k, H], contiguous, and weights [T, k] -> [T, H]."""
    num_tokens, top_k, hidden = answers.shape
    out = answers.new_empty(num_tokens, hidden)
    if num_tokens:
        width = min(1024, triton.next_power_of_2(hidden))
        combine_kernel[(num_tokens, triton.cdiv(hidden, width))](
            answers, weights, out, H=hidden, TOP_K=top_k, WIDTH=width
        )
    return out
