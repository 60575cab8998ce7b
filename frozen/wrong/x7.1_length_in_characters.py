"""The length of text is counted in characters, not bytes. Input: dtype "fp8é"."""

def block_key(block_hash, model, version, dtype, block_size):
    hashed = xxhash.xxh3_128()
    for field in (block_hash.to_bytes(8, "little"), model, version, dtype, block_size.to_bytes(4, "little")):
        hashed.update(len(field).to_bytes(4, "little"))
        hashed.update(field.encode() if isinstance(field, str) else field)
    return hashed.digest()
