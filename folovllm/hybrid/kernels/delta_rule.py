"""The gated delta rule over a ragged batch: a kernel for decodes, and one for several tokens, chunk by chunk.

In torch they are `hybrid.delta_rule.delta_rule_step` and `delta_rule_chunk`, which explain what is computed. A program
computes some columns of one head's state and needs no others: the answer for a key is computed column by column.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from folovllm.hybrid.delta_rule import EPS

BLOCK_DV = 32  # columns of a state that a program has
CHUNK = 32  # tokens; the work of the triangular system grows with its square


@triton.jit
def l2norm_rows(x, EPS: tl.constexpr):
    """Rows [n, D] in float32 with length 1."""
    x = x.to(tl.float32)
    return x * tl.rsqrt(tl.sum(x * x, 1) + EPS)[:, None]


@triton.jit
def load_gates(a_ptr, b_ptr, A_log_ptr, dt_bias_ptr, token, inside, head, stride_a, stride_b):
    """Return `g` and `beta` of tokens [n] in one head, as `GatedDeltaNet.gates` has them. Outside both are 0: nothing happens."""
    a = tl.load(a_ptr + token * stride_a + head, mask=inside, other=0.0).to(tl.float32) + tl.load(dt_bias_ptr + head)
    softplus = tl.where(a > 20.0, a, tl.log(1 + tl.exp(tl.minimum(a, 20.0))))
    g = -tl.exp(tl.load(A_log_ptr + head)) * softplus
    b = tl.load(b_ptr + token * stride_b + head, mask=inside, other=0.0).to(tl.float32)
    return tl.where(inside, g, 0.0), tl.where(inside, 1 / (1 + tl.exp(-b)), 0.0)


@triton.jit
def load_heads(
    mixed_ptr, token, inside, head, column, Hk: tl.constexpr, Hv: tl.constexpr, Dk: tl.constexpr, Dv: tl.constexpr,
    BLOCK_DK: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """Return queries and keys [n, BLOCK_DK] of length 1, and some columns of the values, of tokens [n] in one value head."""
    i, k_head = tl.arange(0, BLOCK_DK), head // (Hv // Hk)
    row = mixed_ptr + token[:, None] * (2 * Hk * Dk + Hv * Dv)
    mask = inside[:, None] & (i < Dk)[None, :]
    query = l2norm_rows(tl.load(row + k_head * Dk + i[None, :], mask=mask, other=0.0), EPS) * (Dk**-0.5)
    key = l2norm_rows(tl.load(row + (Hk + k_head) * Dk + i[None, :], mask=mask, other=0.0), EPS)
    value = tl.load(
        row + 2 * Hk * Dk + head * Dv + column[None, :], mask=inside[:, None] & (column < Dv)[None, :], other=0.0
    )
    return query, key, value.to(tl.float32)


@triton.jit(do_not_specialize_on_alignment=["start_ptr", "len_ptr", "row_ptr", "a_ptr", "b_ptr"])
def delta_decode_kernel(
    mixed_ptr, a_ptr, b_ptr, A_log_ptr, dt_bias_ptr, state_ptr, out_ptr, start_ptr, len_ptr, row_ptr, stride_a, stride_b,
    Hk: tl.constexpr, Hv: tl.constexpr, Dk: tl.constexpr, Dv: tl.constexpr, BLOCK_DK: tl.constexpr, BLOCK_DV: tl.constexpr,
    EPS: tl.constexpr,
):  # fmt: skip
    """Program (columns, value head, sequence): one token, by `delta_rule_step`. Padding has no token."""
    head, seq = tl.program_id(1), tl.program_id(2)
    start = tl.load(start_ptr + seq)
    if tl.load(start_ptr + seq + 1) > start:
        column, i = tl.program_id(0) * BLOCK_DV + tl.arange(0, BLOCK_DV), tl.arange(0, BLOCK_DK)
        token, one = start.to(tl.int64) + tl.zeros([1], tl.int64), tl.full([1], 1, tl.int1)
        query, key, value = load_heads(mixed_ptr, token, one, head, column, Hk, Hv, Dk, Dv, BLOCK_DK, EPS)
        g, beta = load_gates(a_ptr, b_ptr, A_log_ptr, dt_bias_ptr, token, one, head, stride_a, stride_b)
        state_ptr += (tl.load(row_ptr + seq).to(tl.int64) * Hv + head) * Dk * Dv
        at = i[:, None] * Dv + column[None, :]
        mask = (i < Dk)[:, None] & (column < Dv)[None, :]
        known = tl.load(len_ptr + seq) > 1  # else the slot holds another sequence's state
        state = tl.load(state_ptr + at, mask=mask & known, other=0.0) * tl.exp(tl.sum(g, 0))
        key, query = tl.reshape(key, [BLOCK_DK, 1]), tl.reshape(query, [BLOCK_DK, 1])
        delta = tl.sum(beta, 0) * (tl.reshape(value, [BLOCK_DV]) - tl.sum(key * state, 0))
        state += key * delta[None, :]
        tl.store(state_ptr + at, state, mask=mask)
        out = tl.sum(query * state, 0).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + (start.to(tl.int64) * Hv + head) * Dv + column, out, mask=column < Dv)


@triton.jit
def solve_unit_lower(system, x, SIZE: tl.constexpr):
    """Solve (I + L) y = x for y [SIZE, n], L being `system` [SIZE, SIZE] below its diagonal: forward substitution, row by row."""
    i = tl.arange(0, SIZE)
    for row in range(1, SIZE):
        factors = tl.sum(tl.where((i[:, None] == row) & (i[None, :] < row), system, 0.0), 0)
        known = tl.sum(factors[:, None] * x, 0)
        x = tl.where((i == row)[:, None], x - known[None, :], x)
    return x


@triton.jit
def multiply(a, b, DTYPE: tl.constexpr):
    """The product of two matrices in float32, of factors that are rounded to the dtype of the model."""
    return tl.dot(a.to(DTYPE), b.to(DTYPE), input_precision="ieee")


@triton.jit
def delta_chunk(state, query, key, value, g, beta, CHUNK: tl.constexpr, DTYPE: tl.constexpr):
    """Fold a chunk into the columns `state` [Dk, BLOCK_DV]: `delta_rule_chunk` for one head. Returns outputs and state."""
    i = tl.arange(0, CHUNK)
    c = tl.cumsum(g, 0)
    last = tl.sum(g, 0)
    lower = i[:, None] >= i[None, :]
    decay = tl.where(lower, tl.exp(tl.where(lower, c[:, None] - c[None, :], 0.0)), 0.0)
    since_start = tl.exp(c)[:, None]
    system = beta[:, None] * multiply(key, tl.trans(key), DTYPE) * decay
    rhs = beta[:, None] * (value - since_start * multiply(key, state, DTYPE))
    delta = solve_unit_lower(system, rhs, CHUNK)
    scores = multiply(query, tl.trans(key), DTYPE) * decay
    out = since_start * multiply(query, state, DTYPE) + multiply(scores, delta, DTYPE)
    kept = tl.exp(last - c)[:, None] * delta
    return out, tl.exp(last) * state + multiply(tl.trans(key), kept, DTYPE)


@triton.jit(
    do_not_specialize=["first_seq"],
    do_not_specialize_on_alignment=["start_ptr", "len_ptr", "row_ptr", "a_ptr", "b_ptr"],
)
def delta_prefill_kernel(
    mixed_ptr, a_ptr, b_ptr, A_log_ptr, dt_bias_ptr, state_ptr, out_ptr, start_ptr, len_ptr, row_ptr, stride_a, stride_b,
    first_seq, Hk: tl.constexpr, Hv: tl.constexpr, Dk: tl.constexpr, Dv: tl.constexpr, BLOCK_DK: tl.constexpr,
    BLOCK_DV: tl.constexpr, EPS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Program (columns, value head, sequence): all new tokens, chunk by chunk; the state stays in registers."""
    head, seq = tl.program_id(1), first_seq + tl.program_id(2)
    start = tl.load(start_ptr + seq)
    query_len = tl.load(start_ptr + seq + 1) - start
    if query_len > 0:
        column, i, n = tl.program_id(0) * BLOCK_DV + tl.arange(0, BLOCK_DV), tl.arange(0, BLOCK_DK), tl.arange(0, CHUNK)
        state_ptr += (tl.load(row_ptr + seq).to(tl.int64) * Hv + head) * Dk * Dv
        at = i[:, None] * Dv + column[None, :]
        mask = (i < Dk)[:, None] & (column < Dv)[None, :]
        known = tl.load(len_ptr + seq) > query_len
        state = tl.load(state_ptr + at, mask=mask & known, other=0.0)
        for first in range(0, query_len, CHUNK):
            token, inside = (start + first + n).to(tl.int64), first + n < query_len
            query, key, value = load_heads(mixed_ptr, token, inside, head, column, Hk, Hv, Dk, Dv, BLOCK_DK, EPS)
            g, beta = load_gates(a_ptr, b_ptr, A_log_ptr, dt_bias_ptr, token, inside, head, stride_a, stride_b)
            # Rounded at once, they take half as many registers while the system is solved.
            query, key = query.to(mixed_ptr.dtype.element_ty), key.to(mixed_ptr.dtype.element_ty)
            out, state = delta_chunk(state, query, key, value, g, beta, CHUNK, mixed_ptr.dtype.element_ty)
            out_at = out_ptr + (token[:, None] * Hv + head) * Dv + column[None, :]
            tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=inside[:, None] & (column < Dv)[None, :])
        tl.store(state_ptr + at, state, mask=mask)


@dataclass(frozen=True, slots=True)
class DeltaHeads:
    """The geometry of a layer."""

    num_k_heads: int
    num_v_heads: int
    k_dim: int
    v_dim: int


def delta_rule(
    mixed: torch.Tensor,
    gates: tuple[torch.Tensor, ...],
    state: torch.Tensor,
    heads: DeltaHeads,
    starts: torch.Tensor,
    seq_lens: torch.Tensor,
    rows: torch.Tensor,
    num_decodes: int,
) -> torch.Tensor:
    """Apply the rule to all sequences of a batch: `mixed` [T, 2 Hk Dk + Hv Dv] -> [T, Hv, Dv] in its dtype.

    Args:
        gates: `a` and `b` [T, Hv] as the projection gives them, `A_log` and `dt_bias` [Hv] in float32.
        state: [slots, Hv, Dk, Dv] float32, updated in place for the batch's rows.
        starts, seq_lens, rows, num_decodes: as of `short_conv`.
    """
    a, b, A_log, dt_bias = gates
    hk, hv, dk, dv = heads.num_k_heads, heads.num_v_heads, heads.k_dim, heads.v_dim
    out = torch.empty(len(mixed), hv, dv, dtype=mixed.dtype, device=mixed.device)
    shared = mixed, a, b, A_log, dt_bias, state, out, starts, seq_lens, rows, a.stride(0), b.stride(0)
    sizes = {"Hk": hk, "Hv": hv, "Dk": dk, "Dv": dv, "BLOCK_DV": BLOCK_DV, "EPS": EPS}
    tiles, others, width = triton.cdiv(dv, BLOCK_DV), len(rows) - num_decodes, triton.next_power_of_2(dk)
    if num_decodes:
        delta_decode_kernel[(tiles, hv, num_decodes)](*shared, BLOCK_DK=width, **sizes)
    if others:
        delta_prefill_kernel[(tiles, hv, others)](
            *shared,
            num_decodes,
            BLOCK_DK=max(16, width),
            **sizes,
            CHUNK=CHUNK,
            num_stages=1,
            num_warps=8,
        )
    return out
