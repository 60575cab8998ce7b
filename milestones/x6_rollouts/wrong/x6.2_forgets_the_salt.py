"""Hashes the generation alone: after the first update all tenants find each other's prefixes."""

import xxhash


def generation_root(salt, generation):
    if generation == 0:
        return salt
    return xxhash.xxh64_intdigest(generation.to_bytes(8, "little"))
