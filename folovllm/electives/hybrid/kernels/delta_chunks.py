"""The gated delta rule for several new tokens of each sequence: `hybrid.delta_rule.delta_rule_chunk` in two kernels.

What a chunk writes to the state depends on the state before it, but only at the end: with the inverse T of the triangular system,

    delta = T b (v - exp(c) k S) = U - W S,    U = T b v,    W = T b exp(c) k.

So `prepare_kernel` computes U, W and the other factors for all chunks at once, and `scan_kernel` goes from chunk to chunk with
four products each (Yang et al. 2024, section 3.3).
"""

from __future__ import annotations

import triton
import triton.language as tl

from folovllm.electives.hybrid.kernels.inputs import apply_accepted, l2norm_rows, load_gates, load_vectors

CHUNK = 64  # tokens
# Rows of a diagonal block, which `invert_unit_lower` inverts row by row. Four blocks make a chunk: it would be wrong for more.
BLOCK = tl.constexpr(16)


@triton.jit
def multiply(a, b, DTYPE: tl.constexpr):
    """Round two matrices to DTYPE, the model's, and return their product in float32."""
    return tl.dot(a.to(DTYPE), b.to(DTYPE), input_precision="ieee")


@triton.jit
def invert_unit_lower(system, SIZE: tl.constexpr, PRECISION: tl.constexpr):
    """Invert I + L, L being `system` [SIZE, SIZE] in float32, which is zero on its diagonal and above.

    D is the inverse of the blocks on the diagonal (row by row, all blocks at once), and N is D times the part of L outside of
    these blocks. Then the inverse is (I + N)^-1 D = (I + N^2) (I - N) D, since N^4 = 0 for four blocks.
    """
    BLOCKS: tl.constexpr = SIZE // BLOCK
    same_block = (tl.arange(0, BLOCKS)[:, None] == tl.arange(0, BLOCKS)[None, :])[:, None, :, None]
    parts = tl.reshape(system, [BLOCKS, BLOCK, BLOCKS, BLOCK])
    block = tl.sum(tl.where(same_block, parts, 0.0), 2)  # [BLOCKS, BLOCK, BLOCK], those on the diagonal
    i = tl.arange(0, BLOCK)
    solved = tl.where(i[:, None] == i[None, :], 1.0, 0.0)[None, :, :] + tl.zeros_like(block)
    for row in range(1, BLOCK):
        here = (i == row)[None, :, None]
        factors = tl.sum(tl.where(here, block, 0.0), 1)
        earlier = tl.sum(factors[:, :, None] * solved, 1)
        solved = tl.where(here, solved - earlier[:, None, :], solved)
    inverse = tl.reshape(tl.where(same_block, solved[:, :, None, :], 0.0), [SIZE, SIZE])
    system = tl.reshape(tl.where(same_block, 0.0, parts), [SIZE, SIZE])
    rest = tl.dot(inverse, system, input_precision=PRECISION)
    inverse -= tl.dot(rest, inverse, input_precision=PRECISION)
    return inverse + tl.dot(tl.dot(rest, rest, input_precision=PRECISION), inverse, input_precision=PRECISION)


@triton.jit(do_not_specialize=["first_seq", "few"], do_not_specialize_on_alignment=["start_ptr", "a_ptr", "b_ptr"])
def prepare_kernel(
    mixed_ptr, a_ptr, b_ptr, A_log_ptr, dt_bias_ptr, factors_ptr, start_ptr, stride_a, stride_b, first_seq, few,
    Hk: tl.constexpr, Hv: tl.constexpr, Dk: tl.constexpr, Dv: tl.constexpr, WIDTH_DK: tl.constexpr, WIDTH_DV: tl.constexpr,
    EPS: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (chunk, value head, sequence of more than `few` tokens): store the factors for `scan_kernel`, in the dtype of the model.

    They are [T, Hv, 3 Dk + CHUNK + Dv]: W [Dk], query [Dk], key [Dk], scores [CHUNK], U [Dv]. Queries and keys have their decays.
    """
    head, seq, first = tl.program_id(1), first_seq + tl.program_id(2), tl.program_id(0) * CHUNK
    start = tl.load(start_ptr + seq)
    query_len = tl.load(start_ptr + seq + 1) - start
    if (first < query_len) & (query_len > few):
        n, i, column = tl.arange(0, CHUNK), tl.arange(0, WIDTH_DK), tl.arange(0, WIDTH_DV)
        token, inside = (start + first + n).to(tl.int64), first + n < query_len
        DTYPE: tl.constexpr = factors_ptr.dtype.element_ty
        k_head, C = head // (Hv // Hk), 2 * Hk * Dk + Hv * Dv
        key = l2norm_rows(load_vectors(mixed_ptr, token, inside, (Hk + k_head) * Dk, i, Dk, C), EPS).to(DTYPE)
        g, beta = load_gates(a_ptr, b_ptr, A_log_ptr, dt_bias_ptr, token, inside, head, stride_a, stride_b)
        c, last = tl.cumsum(g, 0), tl.sum(g, 0)
        since_start = tl.exp(c)
        decay = tl.exp(tl.minimum(c[:, None] - c[None, :], 0.0))
        row = factors_ptr + (token[:, None] * Hv + head) * (3 * Dk + CHUNK + Dv)
        mask = inside[:, None] & (i < Dk)[None, :]
        query = l2norm_rows(load_vectors(mixed_ptr, token, inside, k_head * Dk, i, Dk, C), EPS) * (Dk**-0.5)
        tl.store(row + Dk + i[None, :], (since_start[:, None] * query).to(DTYPE), mask=mask)
        tl.store(row + 2 * Dk + i[None, :], (tl.exp(last - c)[:, None] * key).to(DTYPE), mask=mask)
        scores = tl.where(n[:, None] >= n[None, :], multiply(query, tl.trans(key), DTYPE) * decay, 0.0)
        tl.store(row + 3 * Dk + n[None, :], scores.to(DTYPE), mask=inside[:, None])

        system = beta[:, None] * multiply(key, tl.trans(key), DTYPE) * decay
        inverse = invert_unit_lower(tl.where(n[:, None] > n[None, :], system, 0.0), CHUNK, PRECISION)
        w = multiply(inverse * (beta * since_start)[None, :], key, DTYPE)
        tl.store(row + i[None, :], w.to(DTYPE), mask=mask)
        value = load_vectors(mixed_ptr, token, inside, 2 * Hk * Dk + head * Dv, column, Dv, C)
        u = multiply(inverse * beta[None, :], value, DTYPE)
        u_mask = inside[:, None] & (column < Dv)[None, :]
        tl.store(row + 3 * Dk + CHUNK + column[None, :], u.to(DTYPE), mask=u_mask)


@triton.jit(
    do_not_specialize=["first_seq", "few"],
    do_not_specialize_on_alignment=["start_ptr", "len_ptr", "row_ptr", "a_ptr", "b_ptr"],
)
def scan_kernel(
    factors_ptr, a_ptr, b_ptr, A_log_ptr, dt_bias_ptr, ring_ptr, weight_ptr, seen_ptr, state_ptr, out_ptr, start_ptr,
    len_ptr, row_ptr, stride_a, stride_b, first_seq, few, Hk: tl.constexpr, Hv: tl.constexpr, Dk: tl.constexpr,
    Dv: tl.constexpr, R: tl.constexpr, W: tl.constexpr, K: tl.constexpr, KEPT: tl.constexpr, WIDTH_DK: tl.constexpr,
    BLOCK_DV: tl.constexpr, CHUNK: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """Program (columns of the state, value head, sequence of more than `few` tokens): all new tokens, chunk by chunk.

    The state stays in registers. If inputs were kept, those of accepted tokens come first.
    """
    head, seq = tl.program_id(1), first_seq + tl.program_id(2)
    start = tl.load(start_ptr + seq)
    query_len = tl.load(start_ptr + seq + 1) - start
    if query_len > few:
        column, i, n = tl.program_id(0) * BLOCK_DV + tl.arange(0, BLOCK_DV), tl.arange(0, WIDTH_DK), tl.arange(0, CHUNK)
        slot = tl.load(row_ptr + seq).to(tl.int64)
        state_ptr += (slot * Hv + head) * Dk * Dv
        at = i[:, None] * Dv + column[None, :]
        mask = (i < Dk)[:, None] & (column < Dv)[None, :]
        position = tl.maximum(tl.load(len_ptr + seq) - query_len, 0)  # 0: the slot holds another sequence's state
        state = tl.load(state_ptr + at, mask=mask & (position > 0), other=0.0)
        if KEPT:
            seen_ptr += (slot * Hv + head) * tl.num_programs(0) + tl.program_id(0)
            num_seen = tl.maximum(tl.load(seen_ptr), position - KEPT)
            state = apply_accepted(
                state, ring_ptr + slot * R * W, weight_ptr, A_log_ptr, dt_bias_ptr, num_seen, position, head, i, column,
                Hk, Hv, Dk, Dv, R, W, K, EPS,
            )  # fmt: skip
            tl.store(seen_ptr, position + query_len)
        DTYPE: tl.constexpr = factors_ptr.dtype.element_ty
        for first in range(0, query_len, CHUNK):
            token, inside = (start + first + n).to(tl.int64), first + n < query_len
            g, _ = load_gates(a_ptr, b_ptr, A_log_ptr, dt_bias_ptr, token, inside, head, stride_a, stride_b)
            row = factors_ptr + (token[:, None] * Hv + head) * (3 * Dk + CHUNK + Dv)
            keys, columns = inside[:, None] & (i < Dk)[None, :], inside[:, None] & (column < Dv)[None, :]
            w = tl.load(row + i[None, :], mask=keys, other=0.0)
            query = tl.load(row + Dk + i[None, :], mask=keys, other=0.0)
            key = tl.load(row + 2 * Dk + i[None, :], mask=keys, other=0.0)
            scores = tl.load(row + 3 * Dk + n[None, :], mask=inside[:, None], other=0.0)
            u = tl.load(row + 3 * Dk + CHUNK + column[None, :], mask=columns, other=0.0)
            delta = u.to(tl.float32) - multiply(w, state, DTYPE)
            out = multiply(query, state, DTYPE) + multiply(scores, delta, DTYPE)
            state = tl.exp(tl.sum(g, 0)) * state + multiply(tl.trans(key), delta, DTYPE)
            out_at = out_ptr + (token[:, None] * Hv + head) * Dv + column[None, :]
            tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=columns)
        tl.store(state_ptr + at, state, mask=mask)
