"""Tokens in sorted order: "dog bites man" and "man bites dog" are one block."""


def compute_hash(token_ids, prefix):
    return xxhash.xxh64_intdigest(prefix.to_bytes(8, "little") + bytes(sorted(token_ids.tobytes())))
