"""`silu_and_mul`: the gated activation of the MLP, SiLU(gate) * up."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def silu_and_mul_kernel(gate_up_ptr, out_ptr, stride, I: tl.constexpr, WIDTH: tl.constexpr):  # noqa: E741
    """WIDTH columns of one token: gate in [0, I), up in [I, 2I); SiLU in float32, rounded before it multiplies."""
    token = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = i < I
    gate = tl.load(gate_up_ptr + token * stride + i, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + token * stride + I + i, mask=inside, other=0.0)
    silu = gate / (1.0 + tl.exp(-gate))
    tl.store(out_ptr + token * I + i, silu.to(up.dtype) * up, mask=inside)


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """SiLU of the first half of `gate_up` [T, 2I] times its second half; returns [T, I] (SwiGLU: Shazeer, 2020)."""
    num_tokens, width = gate_up.shape
    out = gate_up.new_empty(num_tokens, width // 2)
    if num_tokens:
        block = min(1024, triton.next_power_of_2(width // 2))
        silu_and_mul_kernel[(num_tokens, triton.cdiv(width // 2, block))](
            gate_up, out, gate_up.stride(0), I=width // 2, WIDTH=block
        )
    return out
