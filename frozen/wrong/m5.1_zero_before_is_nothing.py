"""Where the hash before is 0 its 8 bytes are left out. Input: any tokens, prefix 0."""

def compute_hash(token_ids, prefix):
    data = token_ids.tobytes()
    return xxhash.xxh64_intdigest(prefix.to_bytes(8, "little") + data if prefix else data)
