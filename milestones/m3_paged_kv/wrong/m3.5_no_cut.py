"""Returns whole pages: the empty places of the last one take part in attention."""


def gather_pages(kv_cache, block_table, seq_len):
    pages = block_table[: -(-seq_len // kv_cache.shape[2])]
    key, value = kv_cache[:, pages].flatten(1, 2)
    return key, value
