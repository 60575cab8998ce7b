"""Gathers one block more where the last one is full. Input: seq_len 8, blocks of 4, the table [3, 1, 10 ** 6]."""

def gather_blocks(kv_cache, block_table, seq_len):
    blocks = block_table[: seq_len // kv_cache.shape[2] + 1].long()
    key, value = (kv_cache[i][blocks].flatten(0, 1)[:seq_len] for i in range(2))
    return key, value
