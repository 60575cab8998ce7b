"""Leaves out the version: after an update in place the blocks of the old weights are found again."""

import xxhash


def block_key(block_hash, model, version, dtype, block_size):
    fields = block_hash.to_bytes(8, "little"), model, b"", dtype.encode(), block_size.to_bytes(4, "little")
    return xxhash.xxh3_128_digest(b"".join(len(field).to_bytes(4, "little") + field for field in fields))
