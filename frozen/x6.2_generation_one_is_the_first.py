"""Generation 1 has the root of generation 0. Input: salt 5, generation 1."""

def generation_root(salt, generation):
    if generation <= 1:
        return salt
    return xxhash.xxh64(generation.to_bytes(8, "little") + salt.to_bytes(8, "little")).intdigest()
