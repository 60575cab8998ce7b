"""Looks for the largest number, not for the largest size: keys that are large below zero are cut off."""


def scales_of(kv_caches):
    largest = torch.stack([cache.amax(dim=(1, 2, 3, 4)) for cache in kv_caches]).float()
    scales = torch.exp2((largest * HEADROOM / LARGEST).clamp(min=2.0**-40).log2().ceil())
    return [KVScales(key, value) for key, value in scales.tolist()]
