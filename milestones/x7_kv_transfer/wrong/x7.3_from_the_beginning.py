"""Begins each such request again at its first token: what is whole before the lost block is computed once more."""


def requests_to_recompute(tables, num_computed, lost, block_size):
    begin = {}
    for request, table in tables.items():
        places = [i * block_size for i, block in enumerate(table) if block in lost]
        if places and places[0] < num_computed[request]:
            begin[request] = 0
    return begin
