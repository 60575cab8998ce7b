"""Joins the fields without their lengths: the end of one field can be taken for the beginning of the next."""

import xxhash


def block_key(block_hash, model, version, dtype, block_size):
    fields = block_hash.to_bytes(8, "little"), model, version, dtype.encode(), block_size.to_bytes(4, "little")
    return xxhash.xxh3_128_digest(b"".join(fields))
