"""The salt's bytes stand before the generation's. Input: salt 1, generation 2."""

def generation_root(salt, generation):
    if generation == 0:
        return salt
    return xxhash.xxh64(salt.to_bytes(8, "little") + generation.to_bytes(8, "little")).intdigest()
