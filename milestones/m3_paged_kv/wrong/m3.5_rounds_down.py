"""Rounds the number of blocks down: the tokens on the last block, if it is not full, are not seen."""


def gather_blocks(kv_cache, block_table, seq_len):
    blocks = block_table[: max(1, seq_len // kv_cache.shape[2])]
    key, value = kv_cache[:, blocks].flatten(1, 2)[:, :seq_len]
    return key, value
