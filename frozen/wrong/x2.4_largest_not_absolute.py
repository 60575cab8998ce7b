"""Takes the largest number, not the largest size. Input: keys from -100 to 1."""

def scales_of(kv_caches):
    found = []
    for cache in kv_caches:
        key, value = (
            2.0 ** torch.ceil(torch.log2(part.float().max().clamp(min=1e-30) * HEADROOM / LARGEST)).item() for part in cache
        )
        found.append(KVScales(key, value))
    return found
