"""Multiplies the token's number by the row's stride in int32, which overflows where rows are far apart."""


def store_kvcache_kernel(key_ptr, value_ptr, k_cache_ptr, v_cache_ptr, slot_ptr, stride_key, stride_value, STRIDE_BLOCK: tl.constexpr, STRIDE_TOKEN: tl.constexpr, STRIDE_HEAD: tl.constexpr, B: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr):
    token = tl.program_id(0)
    slot = tl.load(slot_ptr + token).to(tl.int64)
    if slot < 0:
        return
    i = tl.arange(0, WIDTH)
    inside = i < HKV * D
    target = slot // B * STRIDE_BLOCK + slot % B * STRIDE_TOKEN + i // D * STRIDE_HEAD + i % D  # [WIDTH]
    key = tl.load(key_ptr + token * stride_key + i, mask=inside)
    value = tl.load(value_ptr + token * stride_value + i, mask=inside)
    tl.store(k_cache_ptr + target, key, mask=inside)
    tl.store(v_cache_ptr + target, value, mask=inside)
