"""Takes a lost block off the list with its first holder: the others that share it go on with what is not there."""


def requests_to_recompute(tables, num_computed, lost, block_size):
    begin, left = {}, set(lost)
    for request, table in tables.items():
        places = [i * block_size for i, block in enumerate(table) if block in left]
        left.difference_update(table)
        if places and places[0] < num_computed[request]:
            begin[request] = places[0]
    return begin
