"""Takes salt 0 for no tenant, and hashes nothing for it: all generations have one root."""

import xxhash


def generation_root(salt, generation):
    if generation == 0 or not salt:
        return salt
    return xxhash.xxh64_intdigest(generation.to_bytes(8, "little") + salt.to_bytes(8, "little"))
