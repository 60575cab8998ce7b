"""Python's `hash` of a tuple: signed, and another number in another process or version."""


def compute_hash(token_ids, prefix):
    return hash((prefix, *token_ids.tolist()))
