"""Gives K and V in float32, whatever the cache holds: a copy more, and twice the memory in bfloat16."""


def gather_blocks(kv_cache, block_table, seq_len):
    B = kv_cache.shape[2]
    blocks = block_table[: -(-seq_len // B)].long()
    key, value = (kv_cache[i].index_select(0, blocks).flatten(0, 1)[:seq_len].float() for i in (0, 1))
    return key, value
