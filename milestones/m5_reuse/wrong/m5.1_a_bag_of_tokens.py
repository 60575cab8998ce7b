"""Tokens in sorted order: "dog bites man" and "man bites dog" are one page."""


def compute_hash(token_ids, prefix):
    digest = xxhash.xxh64(prefix.to_bytes(8, "little"))
    digest.update(bytes(sorted(token_ids.tobytes())))
    return digest.intdigest()
