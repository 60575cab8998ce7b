"""Begins again at the last lost block: what lies between was computed from K/V that are lost, and so is wrong."""


def requests_to_recompute(tables, num_computed, lost, block_size):
    begin = {}
    for request, table in tables.items():
        places = [i * block_size for i, block in enumerate(table) if block in lost]
        if places and places[-1] < num_computed[request]:
            begin[request] = places[-1]
    return begin
