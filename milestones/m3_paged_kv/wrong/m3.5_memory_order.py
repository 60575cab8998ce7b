"""Merges the dimensions in the order of memory, where heads come before the places on a block: tokens and heads are mixed up."""


def gather_blocks(kv_cache, block_table, seq_len):
    blocks = block_table[: -(-seq_len // kv_cache.shape[2])]
    copied = kv_cache.transpose(2, 3)[:, blocks]
    key, value = copied.reshape(2, -1, kv_cache.shape[3], kv_cache.shape[4])[:, :seq_len]
    return key, value
