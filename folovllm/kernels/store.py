"""`store_kvcache`: scatter the new keys and values into their blocks."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit(do_not_specialize_on_alignment=["slot_ptr"])
def store_kvcache_kernel(
    key_ptr, value_ptr, k_cache_ptr, v_cache_ptr, slot_ptr, stride_key, stride_value,
    STRIDE_BLOCK: tl.constexpr, STRIDE_TOKEN: tl.constexpr, STRIDE_HEAD: tl.constexpr,
    B: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Copy one token's K and V, [Hkv, D] each, to its slot; one program a token.

    Slot `s` is token `s % B` of block `s // B`. A slot of -1 writes nothing: it marks padding, and as an index it
    would hit the last block. A token's heads lie side by side in `key` and `value`, whose rows are `stride_key` and
    `stride_value` apart; in the cache the D numbers of a head do. Slots may be int32, for which a place in a large cache
    is too much: make them int64 first. WIDTH is the power of two from Hkv * D up.
    """
    token = tl.program_id(0)
    slot = tl.load(slot_ptr + token).to(tl.int64)
    if slot < 0:
        return
    i = tl.arange(0, WIDTH)
    inside = i < HKV * D
    target = slot // B * STRIDE_BLOCK + slot % B * STRIDE_TOKEN + i // D * STRIDE_HEAD + i % D  # [WIDTH]
    key = tl.load(key_ptr + token.to(tl.int64) * stride_key + i, mask=inside)
    value = tl.load(value_ptr + token.to(tl.int64) * stride_value + i, mask=inside)
    tl.store(k_cache_ptr + target, key, mask=inside)
    tl.store(v_cache_ptr + target, value, mask=inside)


def store_kvcache(key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Write `key` and `value` [T, Hkv, D] to their slots of `kv_cache` [2, N, B, Hkv, D]; slot -1 is skipped.

    `key` and `value` may be slices of one QKV projection: only the heads of a token must be contiguous. `kv_cache`
    may be a permuted view, since it is addressed by its strides.
    """
    num_tokens, num_kv_heads, head_dim = key.shape
    if num_tokens == 0:
        return
    k_cache, v_cache = kv_cache.unbind(0)
    stride_block, stride_token, stride_head, _ = k_cache.stride()
    store_kvcache_kernel[(num_tokens,)](
        key, value, k_cache, v_cache, slot_mapping, key.stride(0), value.stride(0),
        STRIDE_BLOCK=stride_block, STRIDE_TOKEN=stride_token, STRIDE_HEAD=stride_head,
        B=kv_cache.shape[2], HKV=num_kv_heads, D=head_dim, WIDTH=triton.next_power_of_2(num_kv_heads * head_dim),
    )  # fmt: skip
