"""An index of a block and an offset for each token."""

def gather_blocks(kv_cache, block_table, seq_len):
    at = torch.arange(seq_len, device=kv_cache.device)
    size = kv_cache.shape[2]
    blocks, offsets = block_table.to(torch.int64)[at // size], at % size
    return kv_cache[0, blocks, offsets], kv_cache[1, blocks, offsets]
