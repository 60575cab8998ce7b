"""Device functions that the kernels of the delta rule share: they load one head's vectors and gates of several tokens."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def l2norm_rows(x, EPS: tl.constexpr):
    """Divide each row of `x` [n, D] by its L2 norm."""
    return x * tl.rsqrt(tl.sum(x * x, 1) + EPS)[:, None]


@triton.jit
def load_gates(a_ptr, b_ptr, A_log_ptr, dt_bias_ptr, token, inside, head, stride_a, stride_b):
    """Return `g` and `beta` [n] of one head, as `GatedDeltaNet.gates` does. Where `inside` is false both are 0 and leave the state as it is."""
    a = tl.load(a_ptr + token * stride_a + head, mask=inside, other=0.0).to(tl.float32) + tl.load(dt_bias_ptr + head)
    softplus = tl.where(a > 20.0, a, tl.log(1 + tl.exp(tl.minimum(a, 20.0))))
    g = -tl.exp(tl.load(A_log_ptr + head)) * softplus
    b = tl.load(b_ptr + token * stride_b + head, mask=inside, other=0.0).to(tl.float32)
    return tl.where(inside, g, 0.0), tl.where(inside, 1 / (1 + tl.exp(-b)), 0.0)


@triton.jit
def load_vectors(mixed_ptr, token, inside, first, i, D: tl.constexpr, C: tl.constexpr):
    """Return columns `first` to `first + D` of `mixed` [T, C] for each `token` [n], in float32: [n, len(i)], padded with zeros."""
    at = mixed_ptr + token[:, None] * C + first + i[None, :]
    return tl.load(at, mask=inside[:, None] & (i < D)[None, :], other=0.0).to(tl.float32)
