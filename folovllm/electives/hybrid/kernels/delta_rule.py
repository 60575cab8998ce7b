"""The gated delta rule over a ragged batch: a kernel for decodes, and two for several tokens (`delta_chunks`).

In torch they are `hybrid.delta_rule.delta_rule_step` and `delta_rule_chunk`, which explain the computation. A program
updates some columns of one head's state. It needs no others: what the state holds for a key is computed column by column.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from folovllm.electives.hybrid.delta_rule import EPS
from folovllm.electives.hybrid.kernels.delta_chunks import CHUNK, prepare_kernel, scan_kernel
from folovllm.electives.hybrid.kernels.inputs import l2norm_rows, load_gates, load_vectors
from folovllm.kernels.pdl import launch_options, let_next_start, wait_for_inputs

BLOCK_DV = 32  # columns of the state that a program updates


@triton.jit(do_not_specialize_on_alignment=["start_ptr", "len_ptr", "row_ptr", "a_ptr", "b_ptr"])
def delta_decode_kernel(
    mixed_ptr, a_ptr, b_ptr, A_log_ptr, dt_bias_ptr, state_ptr, out_ptr, start_ptr, len_ptr, row_ptr, stride_a, stride_b,
    Hk: tl.constexpr, Hv: tl.constexpr, Dk: tl.constexpr, Dv: tl.constexpr, WIDTH_DK: tl.constexpr, BLOCK_DV: tl.constexpr,
    EPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (columns of the state, value head, sequence): one token, by `delta_rule_step`. Padding has no token.

    Lengths and rows are complete before the step's first layer, so they are read before the wait; the state, after it.
    """
    let_next_start(PDL)
    head, seq = tl.program_id(1), tl.program_id(2)
    start = tl.load(start_ptr + seq)
    if tl.load(start_ptr + seq + 1) > start:
        column, i = tl.program_id(0) * BLOCK_DV + tl.arange(0, BLOCK_DV), tl.arange(0, WIDTH_DK)
        state_ptr += (tl.load(row_ptr + seq).to(tl.int64) * Hv + head) * Dk * Dv
        at = i[:, None] * Dv + column[None, :]
        mask = (i < Dk)[:, None] & (column < Dv)[None, :]
        has_state = tl.load(len_ptr + seq) > 1  # else the slot holds another sequence's state
        wait_for_inputs(PDL)
        token, inside = start.to(tl.int64) + tl.zeros([1], tl.int64), tl.full([1], 1, tl.int1)
        k_head, C = head // (Hv // Hk), 2 * Hk * Dk + Hv * Dv
        query = l2norm_rows(load_vectors(mixed_ptr, token, inside, k_head * Dk, i, Dk, C), EPS) * (Dk**-0.5)
        key = l2norm_rows(load_vectors(mixed_ptr, token, inside, (Hk + k_head) * Dk, i, Dk, C), EPS)
        value = load_vectors(mixed_ptr, token, inside, 2 * Hk * Dk + head * Dv, column, Dv, C)
        g, beta = load_gates(a_ptr, b_ptr, A_log_ptr, dt_bias_ptr, token, inside, head, stride_a, stride_b)
        state = tl.load(state_ptr + at, mask=mask & has_state, other=0.0) * tl.exp(tl.sum(g, 0))
        key, query = tl.reshape(key, [WIDTH_DK, 1]), tl.reshape(query, [WIDTH_DK, 1])
        delta = tl.sum(beta, 0) * (tl.reshape(value, [BLOCK_DV]) - tl.sum(key * state, 0))
        state += key * delta[None, :]
        tl.store(state_ptr + at, state, mask=mask)
        out = tl.sum(query * state, 0).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + (start.to(tl.int64) * Hv + head) * Dv + column, out, mask=column < Dv)


@dataclass(frozen=True, slots=True)
class DeltaHeads:
    """Numbers of heads in a layer, and the dimensions of a key and of a value."""

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
    max_query_len: int,
) -> torch.Tensor:
    """Apply the rule to all sequences of a batch: `mixed` [T, 2 Hk Dk + Hv Dv] -> [T, Hv, Dv] in its dtype.

    Args:
        gates: `a` and `b` [T, Hv] as the projection gives them, `A_log` and `dt_bias` [Hv] in float32.
        state: [slots, Hv, Dk, Dv] float32, updated in place for the batch's rows.
        starts, seq_lens, rows, num_decodes, max_query_len: as of `short_conv`.
    """
    hk, hv, dk, dv = heads.num_k_heads, heads.num_v_heads, heads.k_dim, heads.v_dim
    out = torch.empty(len(mixed), hv, dv, dtype=mixed.dtype, device=mixed.device)
    common, strides = (state, out, starts, seq_lens, rows), (gates[0].stride(0), gates[1].stride(0))
    tiles, num_prefills, width = triton.cdiv(dv, BLOCK_DV), len(rows) - num_decodes, triton.next_power_of_2(dk)
    if num_decodes:
        delta_decode_kernel[(tiles, hv, num_decodes)](
            mixed, *gates, *common, *strides, Hk=hk, Hv=hv, Dk=dk, Dv=dv, WIDTH_DK=width, BLOCK_DV=BLOCK_DV, EPS=EPS,
            **launch_options(mixed.device, len(mixed)),
        )  # fmt: skip
    if num_prefills:
        is_float32 = mixed.dtype == torch.float32
        factors = torch.empty(len(mixed), hv, 3 * dk + CHUNK + dv, dtype=mixed.dtype, device=mixed.device)
        width, width_dv = max(16, width), max(16, triton.next_power_of_2(dv))
        # Four warps are faster, but with them Triton 3.6 gave NaN where a product had fewer than 64 columns.
        warps = 4 if min(width, width_dv) >= 64 else 2
        prepare_kernel[(triton.cdiv(max_query_len, CHUNK), hv, num_prefills)](
            mixed, *gates, factors, starts, *strides, num_decodes, Hk=hk, Hv=hv, Dk=dk, Dv=dv, WIDTH_DK=width,
            WIDTH_DV=width_dv, EPS=EPS, CHUNK=CHUNK, PRECISION="ieee" if is_float32 else "tf32", num_warps=warps,
        )  # fmt: skip
        scan_kernel[(tiles, hv, num_prefills)](
            factors, *gates, *common, *strides, num_decodes, Hv=hv, Dk=dk, Dv=dv, WIDTH_DK=width, BLOCK_DV=BLOCK_DV,
            CHUNK=CHUNK, num_stages=1 if is_float32 else 3,
        )  # fmt: skip
    return out
