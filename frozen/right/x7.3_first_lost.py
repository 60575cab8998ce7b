"""The place of each lost block in the table, then the least."""

def requests_to_recompute(tables, num_computed, lost, block_size):
    lost = frozenset(lost)
    found = {}
    for number in tables:
        used = tables[number][: -(-num_computed[number] // block_size)]
        places = [i for i, block in enumerate(used) if block in lost]
        if places:
            found[number] = min(places) * block_size
    return found
