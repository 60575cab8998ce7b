"""Leaves the slot in its own type: times a stride an int32 overflows in a cache of 2 ** 31 numbers."""


def store_kvcache_kernel(
    key_ptr, value_ptr, k_cache_ptr, v_cache_ptr, slot_ptr, stride_key, stride_value,
    STRIDE_BLOCK: tl.constexpr, STRIDE_TOKEN: tl.constexpr, STRIDE_HEAD: tl.constexpr,
    B: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    slot = tl.load(slot_ptr + token)
    if slot < 0:
        return
    i = tl.arange(0, WIDTH)
    inside = i < HKV * D
    target = slot // B * STRIDE_BLOCK + slot % B * STRIDE_TOKEN + i // D * STRIDE_HEAD + i % D  # [WIDTH]
    key = tl.load(key_ptr + token.to(tl.int64) * stride_key + i, mask=inside)
    value = tl.load(value_ptr + token.to(tl.int64) * stride_value + i, mask=inside)
    tl.store(k_cache_ptr + target, key, mask=inside)
    tl.store(v_cache_ptr + target, value, mask=inside)
