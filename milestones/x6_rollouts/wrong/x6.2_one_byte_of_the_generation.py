"""Hashes the generation's lowest byte alone: after 256 updates the first generation's blocks are found again."""

import xxhash


def generation_root(salt, generation):
    if generation == 0:
        return salt
    return xxhash.xxh64_intdigest((generation & 0xFF).to_bytes(8, "little") + salt.to_bytes(8, "little"))
