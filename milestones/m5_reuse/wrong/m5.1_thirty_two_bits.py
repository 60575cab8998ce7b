"""Half of the prefix is enough, or so it seems: two pages whose names agree in 32 bits have the same successors."""


def compute_hash(token_ids, prefix):
    digest = xxhash.xxh64((prefix % 2**32).to_bytes(8, "little"))
    digest.update(token_ids.tobytes())
    return digest.intdigest()
