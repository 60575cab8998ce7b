"""Rounds the number of pages down: the tokens on the last page, if it is not full, are not seen."""


def gather_pages(kv_cache, block_table, seq_len):
    pages = block_table[: max(1, seq_len // kv_cache.shape[2])]
    key, value = kv_cache[:, pages].flatten(1, 2)[:, :seq_len]
    return key, value
