"""Returns whole blocks: the empty places of the last one take part in attention."""


def gather_blocks(kv_cache, block_table, seq_len):
    blocks = block_table[: -(-seq_len // kv_cache.shape[2])]
    key, value = kv_cache[:, blocks].flatten(1, 2)
    return key, value
