"""Packs the salt as a signed number. Half of all hashes are 2**63 and more, and do not fit."""

import struct

import xxhash


def generation_root(salt, generation):
    if generation == 0:
        return salt
    return xxhash.xxh64_intdigest(struct.pack("<qq", generation, salt))
