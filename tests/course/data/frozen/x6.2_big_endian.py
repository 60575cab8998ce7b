"""Big endian. Input: generation 1."""

def generation_root(salt, generation):
    if generation == 0:
        return salt
    return xxhash.xxh64(generation.to_bytes(8, "big") + salt.to_bytes(8, "big")).intdigest()
