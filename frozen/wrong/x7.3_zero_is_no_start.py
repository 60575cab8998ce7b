"""A request that begins again at token 0 is left out. Input: its first block is lost."""

def requests_to_recompute(tables, num_computed, lost, block_size):
    found = {}
    for request, table in tables.items():
        starts = (i * block_size for i, block in enumerate(table) if block in lost and i * block_size < num_computed[request])
        if first := next(starts, None):
            found[request] = first
    return found
