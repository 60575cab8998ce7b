"""RMSNorm of each head times silu of a gate, in one pass; in torch it is `hybrid.gated_delta_net.GatedRMSNorm`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from folovllm.kernels.pdl import launch_options, let_next_start, wait_for_inputs

MOST_ALONE = 4096  # heads of a step with a program for each
HEADS_A_PROGRAM = (
    16  # heads of a program of a larger step: 524,288 programs of one head take three times as long as their bytes
)


@triton.jit(do_not_specialize=["num_heads"], do_not_specialize_on_alignment=["gate_ptr"])
def gated_norm_kernel(
    x_ptr, gate_ptr, weight_ptr, out_ptr, num_heads, stride_gate, eps, HEADS: tl.constexpr, D: tl.constexpr,
    WIDTH: tl.constexpr, HEADS_A_PROGRAM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program: HEADS_A_PROGRAM neighbouring heads. Rounded where transformers rounds: the quotient before the weight, and the result."""
    let_next_start(PDL)
    wait_for_inputs(PDL)
    row = (tl.program_id(0).to(tl.int64) * HEADS_A_PROGRAM + tl.arange(0, HEADS_A_PROGRAM))[:, None]
    i = tl.arange(0, WIDTH)[None, :]
    inside = (row < num_heads) & (i < D)
    x = tl.load(x_ptr + row * D + i, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + row // HEADS * stride_gate + row % HEADS * D + i, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + i, mask=i < D, other=0.0)
    normed = (x * tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]).to(weight.dtype) * weight
    out = normed.to(tl.float32) * gate / (1 + tl.exp(-gate))
    tl.store(out_ptr + row * D + i, out.to(out_ptr.dtype.element_ty), mask=inside)


def gated_norm(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Two [T, H, D] -> [T, H, D] in the dtype of `gate`. `x` is contiguous; of `gate` the heads of a token are."""
    tokens, heads, dim = x.shape
    out = torch.empty(x.shape, dtype=gate.dtype, device=x.device)
    if num_heads := tokens * heads:
        rows = 1 if num_heads <= MOST_ALONE else HEADS_A_PROGRAM
        gated_norm_kernel[(triton.cdiv(num_heads, rows),)](
            x, gate, weight, out, num_heads, gate.stride(0), eps, HEADS=heads, D=dim, WIDTH=triton.next_power_of_2(dim),
            HEADS_A_PROGRAM=rows, num_warps=1 if rows == 1 else 4, **launch_options(x.device, tokens),
        )  # fmt: skip
    return out
