"""Half of the prefix is enough, or so it seems: two blocks whose names agree in 32 bits have the same successors."""


def compute_hash(token_ids, prefix):
    return xxhash.xxh64_intdigest((prefix % 2**32).to_bytes(8, "little") + token_ids.tobytes())
