"""`qk_norm_rope_store`: QK-norm, RoPE and the store to the KV cache, in one pass over memory.

Qwen3 normalises every query and key head, RoPE rotates them (Su et al., 2021), and keys and values go to the cache. Separate
kernels would read and write Q and K three times. This one reads each once, and writes K and V to their blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from folovllm.kernels.fp8_cache import less_offset, to_cache
from folovllm.kernels.pdl import launch_options, let_next_start, wait_for_inputs
from folovllm.kernels.rms_norm import inverse_rms
from folovllm.step.kv_format import UNSCALED, KVScales


@dataclass(slots=True, frozen=True)
class Preparation:
    """The steps between the projection of queries and keys and attention: QK-norm, RoPE, and the scales of the cache."""

    cos_sin_cache: torch.Tensor  # [max_position, D] float32 (`RotaryEmbedding`)
    q_weight: torch.Tensor | None = None  # [D]; with `k_weight` the weights of the QK-norm, if there is one
    k_weight: torch.Tensor | None = None
    eps: float = 0.0
    scales: KVScales = UNSCALED  # of the KV cache


@triton.jit
def _weighted(normed, weight, dtype):
    """Round `normed` to the dtype of the weight, multiply them, and round to the model's `dtype`. Gemma's weight is float32."""
    return (normed.to(weight.dtype) * weight).to(dtype).to(tl.float32)


@triton.jit
def pairs(D: tl.constexpr, R: tl.constexpr):
    """Return the dimensions of D/2 pairs, the first and the second of each, both [1, D/2].

    The first R/2 pairs are (i, i + R/2), which RoPE rotates. The others take the rest of the head in the same way.
    """
    i = tl.arange(0, D // 2)[None, :]
    if R == D:
        return i, i + D // 2
    else:
        is_rotated = i < R // 2
        first = tl.where(is_rotated, i, i + R // 2)
        return first, first + tl.where(is_rotated, R // 2, (D - R) // 2)


@triton.jit
def _norm_rope(
    x_ptr, weight_ptr, cos, sin, head, first_at, second_at, mask, scale, eps, NORM: tl.constexpr, D: tl.constexpr
):
    """Normalise and rotate heads, which start at `head` [heads, 1]. Returns the dimensions `first_at` and `second_at`, [heads, D/2]."""
    dtype = x_ptr.dtype.element_ty
    first = (tl.load(x_ptr + head + first_at, mask=mask, other=0.0) * scale).to(dtype).to(tl.float32)
    second = (tl.load(x_ptr + head + second_at, mask=mask, other=0.0) * scale).to(dtype).to(tl.float32)
    if NORM:
        inverse = tl.rsqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / D + eps)[:, None]
        first = _weighted(first * inverse, tl.load(weight_ptr + first_at), dtype)
        second = _weighted(second * inverse, tl.load(weight_ptr + second_at), dtype)
    return (first * cos - second * sin).to(dtype), (second * cos + first * sin).to(dtype)


@triton.jit
def norm_rope(x, other, weight, other_weight, cos, sin, eps, NORM: tl.constexpr, D: tl.constexpr, DTYPE: tl.constexpr):
    """Normalise and rotate whole heads `x` [N, D] of type DTYPE. All inputs are loaded already.

    `other` holds each number's partner, half a head away, and `other_weight` the partner's weight. Two loads are cheaper than
    joining two halves in one tile. Without NORM no weight is used.
    """
    x, other = x.to(tl.float32), other.to(tl.float32)
    if NORM:
        inverse = tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
        x, other = _weighted(x * inverse, weight, DTYPE), _weighted(other * inverse, other_weight, DTYPE)
    return (x * cos + tl.where(tl.arange(0, D)[None, :] < D // 2, -other, other) * sin).to(DTYPE)


@triton.jit
def _norm_rope_whole(x_ptr, rows, weight_ptr, angle_ptr, mask, eps, NORM: tl.constexpr, D: tl.constexpr):
    """Load the heads that start at `rows` [N, 1], and return their `norm_rope`."""
    HALF: tl.constexpr = D // 2
    i = tl.arange(0, D)[None, :]
    partner = (i + HALF) % D
    x = tl.load(x_ptr + rows + i, mask=mask, other=0.0)
    other = tl.load(x_ptr + rows + partner, mask=mask, other=0.0)
    weight, other_weight = x, other
    if NORM:
        weight, other_weight = tl.load(weight_ptr + i), tl.load(weight_ptr + partner)
    cos, sin = tl.load(angle_ptr + i % HALF), tl.load(angle_ptr + HALF + i % HALF)
    return norm_rope(x, other, weight, other_weight, cos, sin, eps, NORM, D, x_ptr.dtype.element_ty)


@triton.jit
def prepare_token(
    qkv_ptr, q_weight_ptr, k_weight_ptr, cos_sin_ptr, k_cache_ptr, v_cache_ptr, table_ptr, head, position, store, eps,
    k_factor, v_factor, offset_ptr, STRIDE_BLOCK: tl.constexpr, STRIDE_TOKEN: tl.constexpr, STRIDE_HEAD: tl.constexpr, B: tl.constexpr,
    HKV: tl.constexpr, G: tl.constexpr, M: tl.constexpr, D: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Return the queries [M, D] of one sequence's new token for one KV head, normalised and rotated, from its row of the projection.

    With `store`, it also writes the token's key and value to the cache, before this program's next load. One program does so.
    """
    g, i = tl.arange(0, M)[:, None], tl.arange(0, D)[None, :]
    angle_ptr = cos_sin_ptr + position.to(tl.int64) * D
    query = _norm_rope_whole(qkv_ptr, (head * G + g) * D, q_weight_ptr, angle_ptr, g < G, eps, NORM, D)
    if store:
        slot = tl.load(table_ptr + position // B).to(tl.int64) * STRIDE_BLOCK + position % B * STRIDE_TOKEN
        target = slot + head * STRIDE_HEAD + i
        row = tl.full([1, 1], (HKV * G + head) * D, tl.int32)
        key = _norm_rope_whole(qkv_ptr, row, k_weight_ptr, angle_ptr, row >= 0, eps, NORM, D)
        key = less_offset(key, offset_ptr, head * D + i, row >= 0)
        tl.store(k_cache_ptr + target, to_cache(key, k_factor, k_cache_ptr))
        value = tl.load(qkv_ptr + row + HKV * D + i)
        tl.store(v_cache_ptr + target, to_cache(value, v_factor, v_cache_ptr))
        tl.debug_barrier()  # all threads have stored before one of them reads the cache
    return query


@triton.jit(do_not_specialize_on_alignment=["position_ptr", "slot_ptr"])
def qk_norm_rope_store_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, q_weight_ptr, k_weight_ptr, cos_sin_ptr, position_ptr, slot_ptr,
    k_cache_ptr, v_cache_ptr, stream_ptr, stride_q, stride_k, stride_v, eps, stream_eps,
    k_factor, v_factor, offset_ptr, STRIDE_BLOCK: tl.constexpr, STRIDE_TOKEN: tl.constexpr, STRIDE_HEAD: tl.constexpr, B: tl.constexpr,
    HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, R: tl.constexpr, STRIDE_Q_HEAD: tl.constexpr, QS: tl.constexpr,
    KVS: tl.constexpr, NORM: tl.constexpr, H: tl.constexpr, WIDTH: tl.constexpr, SCALE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (token): writes its query heads to `out`, and its key and value heads to its slot unless that is -1.

    RoPE rotates the first R dimensions of a head. Query heads are STRIDE_Q_HEAD apart. QS and KVS are the powers of two from HQ
    and HKV up. SCALE: first divide all heads by the root mean square of the token's row of the stream [T, H]. WIDTH is the power
    of two from H up.
    """
    let_next_start(PDL)
    wait_for_inputs(PDL)
    token = tl.program_id(0).to(tl.int64)
    scale = 1.0
    if SCALE:
        scale = inverse_rms(stream_ptr + token * H, stream_eps, H, WIDTH)
    first_at, second_at = pairs(D, R)
    pair = tl.arange(0, D // 2)[None, :]
    angles = cos_sin_ptr + tl.load(position_ptr + token).to(tl.int64) * R
    cos = tl.load(angles + pair, mask=pair < R // 2, other=1.0)  # [1, D/2] float32
    sin = tl.load(angles + R // 2 + pair, mask=pair < R // 2, other=0.0)
    head = tl.arange(0, QS)[:, None]
    first, second = _norm_rope(
        q_ptr + token * stride_q, q_weight_ptr, cos, sin, head * STRIDE_Q_HEAD, first_at, second_at, head < HQ, scale, eps, NORM, D)  # fmt: skip
    out = out_ptr + token * HQ * D + head * D
    tl.store(out + first_at, first, mask=head < HQ)
    tl.store(out + second_at, second, mask=head < HQ)

    slot = tl.load(slot_ptr + token).to(tl.int64)
    head = tl.arange(0, KVS)[:, None]
    keep = (head < HKV) & (slot >= 0)
    target = slot // B * STRIDE_BLOCK + slot % B * STRIDE_TOKEN + head * STRIDE_HEAD
    first, second = _norm_rope(
        k_ptr + token * stride_k, k_weight_ptr, cos, sin, head * D, first_at, second_at, head < HKV, scale, eps, NORM, D)  # fmt: skip
    first = less_offset(first, offset_ptr, head * D + first_at, head < HKV)
    second = less_offset(second, offset_ptr, head * D + second_at, head < HKV)
    tl.store(k_cache_ptr + target + first_at, to_cache(first, k_factor, k_cache_ptr), mask=keep)
    tl.store(k_cache_ptr + target + second_at, to_cache(second, k_factor, k_cache_ptr), mask=keep)
    whole = tl.arange(0, D)[None, :]
    value = tl.load(v_ptr + token * stride_v + head * D + whole, mask=keep, other=0.0)
    value = (value * scale).to(value.dtype)
    tl.store(v_cache_ptr + target + whole, to_cache(value, v_factor, v_cache_ptr), mask=keep)


def qk_norm_rope_store(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    positions: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    preparation: Preparation,
    stream: torch.Tensor | None = None,
    stream_eps: float = 0.0,
) -> torch.Tensor:
    """Normalise (if there are weights) and rotate Q and K, and store K and V. Returns the rotated Q [T, Hq, D].

    Args:
        query: [T, Hq, D], `key` and `value` [T, Hkv, D]. They may be slices of one projection; a token's key heads
            are contiguous, and so are its value heads.
        positions: [T], each below max_position. The kernel does not check that.
        kv_cache: [2, N, B, Hkv, D], any strides but D contiguous.
        slot_mapping: [T]; -1 stores nothing.
        preparation: weights of the norms, the table of angles, the scales of the cache.
        stream: [T, H], contiguous: the residual stream, if Q, K and V were computed from it without its norm. They are
            divided by its rows' root mean square (with `stream_eps`) first.
    """
    (num_tokens, num_heads, head_dim), num_kv_heads = query.shape, key.shape[1]
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    if num_tokens == 0:
        return out
    hidden = 1 if stream is None else stream.shape[1]
    k_cache, v_cache = kv_cache.unbind(0)
    q_weight, k_weight = preparation.q_weight, preparation.k_weight
    stride_block, stride_token, stride_head, _ = k_cache.stride()
    qk_norm_rope_store_kernel[(num_tokens,)](
        query, key, value, out, query if q_weight is None else q_weight, key if k_weight is None else k_weight,
        preparation.cos_sin_cache, positions, slot_mapping, k_cache, v_cache, query if stream is None else stream,
        query.stride(0), key.stride(0), value.stride(0), preparation.eps, stream_eps,
        preparation.scales.key_factor, preparation.scales.value_factor, preparation.scales.offset,
        STRIDE_BLOCK=stride_block, STRIDE_TOKEN=stride_token, STRIDE_HEAD=stride_head, B=kv_cache.shape[2],
        HQ=num_heads, HKV=num_kv_heads, D=head_dim, R=preparation.cos_sin_cache.shape[1],
        STRIDE_Q_HEAD=query.stride(1), QS=triton.next_power_of_2(num_heads),
        KVS=triton.next_power_of_2(num_kv_heads), NORM=q_weight is not None and k_weight is not None,
        H=hidden, WIDTH=triton.next_power_of_2(hidden), SCALE=stream is not None,
        **launch_options(query.device, num_tokens),
    )  # fmt: skip
    return out
