"""Rounds to the power of two below: the largest number, with its headroom, is beyond 448."""


def scales_of(kv_caches):
    largest = torch.stack([cache.abs().amax(dim=(1, 2, 3, 4)) for cache in kv_caches]).float()
    scales = torch.exp2((largest * HEADROOM / LARGEST).clamp(min=2.0**-40).log2().floor())
    return [KVScales(key, value) for key, value in scales.tolist()]
