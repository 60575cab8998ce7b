"""`silu_and_mul` and `gelu_and_mul`: the gated activation of the MLP, SiLU(gate) * up or GELU(gate) * up."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from folovllm.kernels.rms_norm import inverse_rms

MANY_TOKENS = 4096
TWICE_ROOT = tl.constexpr(2 * math.sqrt(2 / math.pi))


@triton.jit
def act_and_mul_kernel(
    gate_up_ptr, stream_ptr, out_ptr, stride, eps, I: tl.constexpr, WIDTH: tl.constexpr, H: tl.constexpr,  # noqa: E741
    STREAM_WIDTH: tl.constexpr, SCALE: tl.constexpr, GELU: tl.constexpr,
):  # fmt: skip
    """Compute some of one token's columns: gate is in [0, I), up in [I, 2I). SiLU is computed in float32, and rounded before the product.

    Grid (tokens, programs of a token), which take WIDTH columns in turn. SCALE: first divide both by the root mean square of the
    token's row of the stream [T, H]. GELU: use its tanh approximation, x (1 + tanh z) / 2, instead of SiLU.
    """
    token = tl.program_id(0).to(tl.int64)
    if SCALE:
        scale = inverse_rms(stream_ptr + token * H, eps, H, STREAM_WIDTH)
    for first in range(tl.program_id(1) * WIDTH, I, tl.num_programs(1) * WIDTH):
        i = first + tl.arange(0, WIDTH)
        inside = i < I
        gate = tl.load(gate_up_ptr + token * stride + i, mask=inside, other=0.0)
        up = tl.load(gate_up_ptr + token * stride + I + i, mask=inside, other=0.0)
        if SCALE:
            gate, up = (gate * scale).to(gate.dtype), (up * scale).to(up.dtype)
        gate = gate.to(tl.float32)
        if GELU:  # (1 + tanh z) / 2 is the sigmoid of 2 z
            act = gate / (1.0 + tl.exp((gate + 0.044715 * gate * gate * gate) * -TWICE_ROOT))
        else:
            act = gate / (1.0 + tl.exp(-gate))
        tl.store(out_ptr + token * I + i, act.to(up.dtype) * up, mask=inside)


def silu_and_mul(gate_up: torch.Tensor, stream: torch.Tensor | None = None, eps: float = 0.0) -> torch.Tensor:
    """Return SiLU of the first half of `gate_up` [T, 2I] times its second half, [T, I] (SwiGLU: Shazeer, 2020).

    With the residual `stream` [T, H], contiguous, `gate_up` was computed from the stream without its norm. Then it is first
    divided by the root mean square of the stream's rows.
    """
    return _act_and_mul(gate_up, stream, eps, is_gelu=False)


def gelu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Return the tanh approximation of GELU of the first half of `gate_up` times its second half (GEGLU, of the same paper)."""
    return _act_and_mul(gate_up, None, 0.0, is_gelu=True)


def _act_and_mul(gate_up: torch.Tensor, stream: torch.Tensor | None, eps: float, is_gelu: bool) -> torch.Tensor:
    num_tokens, width = gate_up.shape
    out = gate_up.new_empty(num_tokens, width // 2)
    if num_tokens:
        block = min(1024, triton.next_power_of_2(width // 2))
        hidden = 1 if stream is None else stream.shape[1]
        # With many tokens one program a token is enough, and it reads its row of the stream only once.
        programs = 1 if num_tokens >= MANY_TOKENS else triton.cdiv(width // 2, block)
        act_and_mul_kernel[(num_tokens, programs)](
            gate_up, gate_up if stream is None else stream, out, gate_up.stride(0), eps, I=width // 2, WIDTH=block,
            H=hidden, STREAM_WIDTH=triton.next_power_of_2(hidden), SCALE=stream is not None,
            GELU=is_gelu,
        )  # fmt: skip
    return out
