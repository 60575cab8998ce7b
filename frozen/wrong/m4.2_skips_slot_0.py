"""Takes slot 0 for padding too. Input: slots [0, 1]."""

def store_kvcache_kernel(
    key_ptr, value_ptr, k_cache_ptr, v_cache_ptr, slot_ptr, stride_key, stride_value,
    STRIDE_BLOCK: tl.constexpr, STRIDE_TOKEN: tl.constexpr, STRIDE_HEAD: tl.constexpr,
    B: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ptr + token).to(tl.int64)
    i = tl.arange(0, WIDTH)
    inside = (i < HKV * D) & (slot > 0)
    place = slot // B * STRIDE_BLOCK + slot % B * STRIDE_TOKEN + i // D * STRIDE_HEAD + i % D
    tl.store(k_cache_ptr + place, tl.load(key_ptr + token * stride_key + i, mask=inside), mask=inside)
    tl.store(v_cache_ptr + place, tl.load(value_ptr + token * stride_value + i, mask=inside), mask=inside)
