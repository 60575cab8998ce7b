"""Device functions that the kernels of the delta rule share: they load one head's vectors and gates, and apply kept inputs.

A sequence's last inputs are in a ring of R rows: those of the token at position p are in row p % R, first the convolution's
[C], then, where a step may keep inputs, `a` and `b` [Hv] each. So what a step writes is never what the same step reads, and
inputs of rejected tokens are written over. R is K - 1, and twice the most inputs that are kept.
"""

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


@triton.jit
def convolved(ring_ptr, weight_ptr, position, c, inside, R: tl.constexpr, W: tl.constexpr, K: tl.constexpr):
    """Return the convolution's channels `c` [n] at a position, from a ring with rows of W numbers: as `short_conv_kernel` stored them."""
    total = tl.zeros(c.shape, tl.float32)
    for j in tl.static_range(K):
        at = position + j - K + 1
        x = tl.load(ring_ptr + (tl.maximum(at, 0) % R) * W + c, mask=inside & (at >= 0), other=0.0).to(tl.float32)
        total += tl.load(weight_ptr + c * K + j, mask=inside, other=0.0).to(tl.float32) * x
    return (total / (1 + tl.exp(-total))).to(ring_ptr.dtype.element_ty).to(tl.float32)


@triton.jit
def updated(state, key, value, g, beta):
    """Return `state` [Dk, columns] after a token, by `delta_rule_step`: `key` [Dk, 1], `value` [columns], `g` and `beta` [1]."""
    state *= tl.exp(tl.sum(g, 0))
    delta = tl.sum(beta, 0) * (value - tl.sum(key * state, 0))
    return state + key * delta[None, :]


@triton.jit
def apply_accepted(
    state, ring_ptr, weight_ptr, A_log_ptr, dt_bias_ptr, num_seen, position, head, i, column,
    Hk: tl.constexpr, Hv: tl.constexpr, Dk: tl.constexpr, Dv: tl.constexpr, R: tl.constexpr, W: tl.constexpr,
    K: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """Return `state`, which has seen `num_seen` tokens, after those before `position`: their kept inputs are in the ring."""
    k_head, gates = head // (Hv // Hk), ring_ptr + 2 * Hk * Dk + Hv * Dv
    for p in range(num_seen, position):
        key = convolved(ring_ptr, weight_ptr, p, (Hk + k_head) * Dk + i, i < Dk, R, W, K)
        key = tl.reshape(l2norm_rows(key[None, :], EPS), [key.shape[0], 1])
        value = convolved(ring_ptr, weight_ptr, p, 2 * Hk * Dk + head * Dv + column, column < Dv, R, W, K)
        row, inside = p % R + tl.zeros([1], tl.int32), tl.full([1], 1, tl.int1)
        g, beta = load_gates(gates, gates + Hv, A_log_ptr, dt_bias_ptr, row, inside, head, W, W)
        state = updated(state, key, value, g, beta)
    return state
