"""The block's own tokens and no prefix: the same sentence in another story gets K/V that was computed after other words."""


def compute_hash(token_ids, prefix):
    return xxhash.xxh64_intdigest(token_ids.tobytes())
