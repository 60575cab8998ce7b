"""Takes the lowest 32 bits of the hash: blocks of other tokens get the same name far sooner."""

import xxhash


def block_key(block_hash, model, version, dtype, block_size):
    half = block_hash & 0xFFFFFFFF
    fields = half.to_bytes(8, "little"), model, version, dtype.encode(), block_size.to_bytes(4, "little")
    return xxhash.xxh3_128_digest(b"".join(len(field).to_bytes(4, "little") + field for field in fields))
