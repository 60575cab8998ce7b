"""Counts blocks that were reserved and hold nothing yet: a request that has lost nothing begins again."""


def requests_to_recompute(tables, num_computed, lost, block_size):
    begin = {}
    for request, table in tables.items():
        places = [i * block_size for i, block in enumerate(table) if block in lost]
        if places:
            begin[request] = places[0]
    return begin
